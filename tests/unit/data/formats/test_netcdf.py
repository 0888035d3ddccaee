"""What is said beside the values: masks, and netCDF attributes of HDF5 arrays. Decoded if asked, else refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data.formats.sources import decode_of, open_dataset
from hpctrain.data.info import describe
from hpctrain.data.order import first_draw
from hpctrain.data.packing.read import open_source
from hpctrain.data.packing.write import write_hdf5
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.data.stream import open_stream
from hpctrain.data.worker import refer_to_dataset, reopen
from hpctrain.errors import UserError
from hpctrain.system.shared_memory import AnonymousMemory

RAW = np.array([[0, 100], [-9999, 250]], np.int16)
MEANT = np.array([[273.15, 274.15], [np.nan, 275.65]], np.float64)
"""RAW * 0.01 + 273.15; -9999 is missing."""
PACKED = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-9999)}


def stored(path: Path, values: Any = RAW, chunks: bool | None = None, **attributes: Any) -> str:
    with h5py.File(path, "w") as file:
        array = file.create_dataset("t", data=values, chunks=chunks)
        array.attrs.update(attributes)
    return str(path)


def read(path: str, **how: Any) -> np.ndarray[Any, Any]:
    data = open_dataset(path, **how)
    values = data.read(np.arange(len(data)))["t"]
    assert data.fields["t"].holds(values[0])
    return values


@pytest.mark.parametrize("chunks", [None, True])
def test_packed_numbers_are_decoded_if_asked_and_refused_otherwise(tmp_path, chunks):
    path = stored(tmp_path / "a.h5", chunks=chunks, **PACKED)
    with pytest.raises(UserError, match=r"'t' holds packed numbers: scale_factor 0\.01, add_offset 273\.15"):
        open_dataset(path)
    np.testing.assert_allclose(read(path, decode="netcdf"), MEANT, rtol=1e-15)  # rounding of one multiply and add
    single = stored(tmp_path / "b.h5", chunks=chunks, scale_factor=np.float32([0.5]))
    assert read(single, decode="netcdf").dtype == np.float32  # netCDF-C writes attributes as arrays of one value
    assert read(single, decode="netcdf").tolist() == (RAW * 0.5).tolist()


@pytest.mark.parametrize("mark", [np.nan, 1e20, -1e20, 0.5, 2.0**15])
def test_a_mark_that_the_stored_type_cannot_hold_marks_nothing(tmp_path, mark):
    """Such as that of the values before they were packed; converted, it would be some other number, mostly 0."""
    path = stored(tmp_path / "a.h5", missing_value=mark, _FillValue=np.int16(-9999))
    assert np.isnan(read(path, decode="netcdf")).tolist() == [[False, False], [True, False]]


def test_missing_values_are_refused_where_they_are_met(tmp_path):
    for name in ("_FillValue", "missing_value"):
        path = stored(tmp_path / f"{name}.h5", **{name: np.int16([-9999])})
        with pytest.raises(UserError, match="'t': 1 of 2 values of sample 1 are -9999, which marks missing values"):
            read(path)
        assert np.isnan(read(path, decode="netcdf")[1, 0])
    none = stored(tmp_path / "none.h5", np.abs(RAW), _FillValue=np.int16(-9999))
    assert read(none).dtype == np.int16  # labels stay whole numbers
    floats = stored(tmp_path / "floats.h5", np.float32([1.0, np.nan]), _FillValue=np.float32("nan"))
    assert np.isnan(read(floats)[1])  # as xarray writes all floats: NaN marks itself


@pytest.mark.parametrize("mark", [np.int64(-(2**63) + 2), np.uint64(2**64 - 2)])  # the default marks of netCDF
def test_whole_numbers_beyond_what_floats_hold_mark_missing_values(tmp_path, mark):
    values = np.array([mark, mark + 1, 1], mark.dtype)
    assert np.isnan(read(stored(tmp_path / "a.h5", values, _FillValue=mark), decode="netcdf")).tolist() == [1, 0, 0]


def test_unsigned_integers_of_netcdf_3_are_not_read_as_signed(tmp_path):
    path = stored(tmp_path / "a.h5", np.array([-1, 1], np.int8), _Unsigned="true")
    with pytest.raises(UserError, match="_Unsigned"):
        open_dataset(path)
    assert read(path, decode="netcdf").tolist() == [255, 1]


def test_pack_and_info_decode_nc_files_and_refuse_others(tmp_path):
    path = stored(tmp_path / "a.nc", **PACKED)
    write_hdf5(tmp_path / "packed.h5", open_source([path]))
    np.testing.assert_allclose(read(str(tmp_path / "packed.h5")), MEANT, rtol=1e-15)
    assert describe(path, 0.01)["fields"][0]["dtype"] == "float64"
    other = stored(tmp_path / "a.h5", **PACKED)
    for use in (lambda: open_source([other]), lambda: describe(other, 0.01)):
        with pytest.raises(UserError, match="packed numbers"):
            use()
    info = [sys.executable, "-m", "hpctrain", "data", "info", other, "--kind", "netcdf", "--seconds", "0.01"]
    assert "float64" in subprocess.run(info, capture_output=True, text=True, check=True).stdout


def test_workers_and_other_data_decode_alike(tmp_path):
    paths = [stored(tmp_path / f"{name}.h5", **PACKED) for name in "ab"]
    data = open_dataset(paths, decode="netcdf")
    assert decode_of(data) == "netcdf"
    memory = AnonymousMemory.create()
    again = reopen(refer_to_dataset(data, memory), memory)
    np.testing.assert_array_equal(again.read(np.arange(4))["t"], np.concatenate([MEANT, MEANT]))


def test_masked_values_are_refused_with_numbers():
    masked = np.ma.masked_equal(RAW, -9999)
    text = "'t' is a masked array: 1 of 4 values are masked, the first is -9999"
    with pytest.raises(UserError, match=text):
        open_dataset({"t": masked})
    with pytest.raises(UserError, match="'t' is a masked array: 1 of 2"):
        open_dataset({"t": [masked[0], masked[1]]})
    with pytest.raises(UserError, match="'t' is a masked array: 1 of 2"):
        open_stream([{"t": masked[1]}])
    data = open_dataset({"t": RAW})
    for recipe in (Recipe(lambda sample, rng: {"t": masked[1]}), Recipe(collate=lambda samples: {"t": masked})):
        with pytest.raises(UserError, match="'t' is a masked array"):
            make_batch(data, recipe, first_draw(np.arange(2)))
    assert open_dataset({"t": np.ma.array(RAW)}).read(np.arange(2))["t"].tolist() == RAW.tolist()
