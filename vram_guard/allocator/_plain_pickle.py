"""Pickles of plain values only (dicts, lists, tuples, strings, numbers): nothing is imported or called."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

#: Opcodes that build plain values, with the number of bytes that follow each (the table in pickletools.py).
#: Everything else is refused before a value is built: what imports and calls, what sets state or makes bytes,
#: and what reserves memory for more than the file holds.
_PLAIN = {
    **dict.fromkeys((pickle.PROTO, pickle.BINPUT, pickle.BINGET, pickle.BININT1), 1),
    pickle.BININT2: 2,
    **dict.fromkeys((pickle.LONG_BINPUT, pickle.LONG_BINGET, pickle.BININT), 4),
    **dict.fromkeys((pickle.FRAME, pickle.BINFLOAT), 8),
    **dict.fromkeys((pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.MARK, pickle.MEMOIZE), 0),
    **dict.fromkeys((pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.APPEND, pickle.APPENDS), 0),
    **dict.fromkeys((pickle.SETITEM, pickle.SETITEMS, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), 0),
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
        raise InvalidInputError(
            _("the pickle asks for {name}; only plain values are read", name=f"{module_name}.{global_name}")
        )

    def persistent_load(self, _pid: Any, /) -> NoReturn:
        raise InvalidInputError(_("the pickle refers to objects outside itself; only plain values are read"))


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
        raise InvalidInputError(
            _("the pickle is damaged ({error}); save it again", error=f"{type(error).__name__}: {error}")
        ) from error


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
                raise InvalidInputError(_("the pickle numbers its values beyond its own length: it is damaged"))
            at += 1 + width
    except IndexError:
        raise InvalidInputError(_("the pickle is cut off: save it again")) from None


def _past_counted(data: bytes, at: int) -> int:
    """The position after an opcode that carries its own length."""
    width = _COUNTED.get(data[at : at + 1])
    if width is None:
        raise InvalidInputError(
            _(
                "not a pickle of plain values: opcode {opcode} at byte {position} is refused. Expected is the file "
                "that torch.cuda.memory._dump_snapshot() writes",
                opcode=f"{data[at]:#04x}",
                position=at,
            )
        )
    return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
