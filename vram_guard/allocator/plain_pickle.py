"""Pickles of plain values only (dicts, lists, tuples, strings, numbers): nothing is imported or called."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from vram_guard.errors import InvalidInputError

#: Opcodes that build plain values, with the number of bytes that follow each (the table in pickletools.py).
#: Everything else is refused before a value is built: what imports and calls, what sets state or makes bytes,
#: and what reserves memory for more than the file holds.
_PLAIN = {
    pickle.PROTO: 1,
    pickle.FRAME: 8,
    pickle.EMPTY_DICT: 0,
    pickle.EMPTY_LIST: 0,
    pickle.EMPTY_TUPLE: 0,
    pickle.MARK: 0,
    pickle.BINPUT: 1,
    pickle.LONG_BINPUT: 4,
    pickle.MEMOIZE: 0,
    pickle.BINGET: 1,
    pickle.LONG_BINGET: 4,
    pickle.BININT: 4,
    pickle.BININT1: 1,
    pickle.BININT2: 2,
    pickle.BINFLOAT: 8,
    pickle.NONE: 0,
    pickle.NEWTRUE: 0,
    pickle.NEWFALSE: 0,
    pickle.APPEND: 0,
    pickle.APPENDS: 0,
    pickle.SETITEM: 0,
    pickle.SETITEMS: 0,
    pickle.TUPLE: 0,
    pickle.TUPLE1: 0,
    pickle.TUPLE2: 0,
    pickle.TUPLE3: 0,
    pickle.STOP: 0,
}

#: Opcodes that are followed by a length of this many bytes (little-endian), and then by as many bytes.
_COUNTED = {pickle.LONG1: 1, pickle.SHORT_BINUNICODE: 1, pickle.BINUNICODE: 4}

_REFUSED = -1
_WIDTHS = [_REFUSED] * 256
for _code, _width in _PLAIN.items():
    _WIDTHS[_code[0]] = _width


class _PlainUnpickler(pickle.Unpickler):
    """A second lock behind the check of the opcodes."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise InvalidInputError(f"the pickle asks for {module_name}.{global_name}; only plain values are read")

    def persistent_load(self, _pid: Any, /) -> NoReturn:
        raise InvalidInputError("the pickle refers to objects outside itself; only plain values are read")


def load_plain_pickle(data: bytes) -> Any:
    """The value of a pickle (protocol 2 or later) that holds nothing but plain values.

    Raises:
        InvalidInputError: for a pickle that holds anything else, is cut off, or is none. Nothing in it was
            run.
    """
    _check_opcodes(data)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except InvalidInputError:
        raise
    except Exception as error:  # damaged pickles raise many kinds: TypeError for an unhashable key, KeyError, ...
        raise InvalidInputError(f"the pickle is damaged ({type(error).__name__}: {error}); save it again") from error


def _check_opcodes(data: bytes) -> None:
    """Walk over the opcodes without building anything; raise at the first that is not plain."""
    widths, stop, put = _WIDTHS, pickle.STOP[0], pickle.LONG_BINPUT[0]
    at = 0
    try:
        while (code := data[at]) != stop:
            width = widths[code]
            if width == _REFUSED:
                at = _past_counted(data, at)
                continue
            if code == put and int.from_bytes(data[at + 1 : at + 5], "little") > len(data):
                # The unpickler makes room for as many entries as the index says.
                raise InvalidInputError("the pickle numbers its values beyond its own length: it is damaged")
            at += 1 + width
    except IndexError:
        raise InvalidInputError("the pickle is cut off: save it again") from None


def _past_counted(data: bytes, at: int) -> int:
    """The position after an opcode that carries its own length."""
    width = _COUNTED.get(data[at : at + 1])
    if width is None:
        raise InvalidInputError(
            f"not a pickle of plain values: opcode {data[at]:#04x} at byte {at} is refused. "
            "Expected is the file that torch.cuda.memory._dump_snapshot() writes"
        )
    return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
