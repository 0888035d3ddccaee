"""GPUs by what the kernel shows, on trees of files like those of real nodes."""

from __future__ import annotations

from pathlib import Path

from hpctrain.system.gpus import Gpu, usable_gpus


def make(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_nvidia_gpus_are_device_files(tmp_path):
    make(tmp_path, {f"dev/{name}": "" for name in ("nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm")})
    assert usable_gpus(tmp_path) == [Gpu("NVIDIA", tmp_path / f"dev/nvidia{index}") for index in (0, 1)]


def test_instinct_and_max_gpus_count_and_graphics_do_not(tmp_path):
    nodes = "sys/class/kfd/kfd/topology/nodes"
    make(tmp_path, {
        f"{nodes}/0/properties": "cpu_cores_count 64\ngfx_target_version 0\ndrm_render_minor 0\n",
        f"{nodes}/1/properties": "simd_count 440\ngfx_target_version 90010\ndrm_render_minor 128\n",
        f"{nodes}/2/properties": "simd_count 16\ngfx_target_version 90012\ndrm_render_minor 129\n",
        **{f"dev/dri/renderD{minor}": "" for minor in range(128, 132)},
        "sys/class/drm/renderD130/device/vendor": "0x8086\n",
        "sys/class/drm/renderD130/device/device": "0x0bd5\n",
        "sys/class/drm/renderD131/device/vendor": "0x8086\n",
        "sys/class/drm/renderD131/device/device": "0x46a6\n",
    })  # fmt: skip
    assert [(gpu.vendor, gpu.path.name) for gpu in usable_gpus(tmp_path)] == [
        ("AMD", "renderD128"), ("Intel", "renderD130"),
    ]  # fmt: skip


def test_a_gpu_that_the_job_may_not_open_is_not_usable(tmp_path):
    make(tmp_path, {"dev/nvidia0": ""})
    (tmp_path / "dev/nvidia1").mkdir(parents=True)  # cannot be opened for writing, even by root
    assert [gpu.path.name for gpu in usable_gpus(tmp_path)] == ["nvidia0"]
    assert usable_gpus(tmp_path / "elsewhere") == []
