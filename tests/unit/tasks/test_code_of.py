"""A resumed run can say that its task's file has changed."""

from hpctrain.tasks.load_task import code_of


def test_the_code_of_a_task_is_that_of_its_file(tmp_path):
    file = tmp_path / "task.py"
    file.write_text('loss = "mse"\n')
    before = code_of(f"{file}:task")
    assert before == code_of(f"{file}:other")
    file.write_text('loss = "mae"\n')
    assert before != code_of(f"{file}:task") is not None
    assert code_of(f"{__name__}:task") == code_of(f"{__file__}:task") is not None
    assert code_of("no.such.module:task") is code_of(f"{tmp_path}/none.py:task") is None
