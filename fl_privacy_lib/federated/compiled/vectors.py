"""Vectors of W floats for numba: what a kernel does with them stays in registers.

numba's loops over arrays spill their sums to memory; explicit vectors do not. A block is a tuple of
vectors, and one operation works on all of them, unrolled. Pointers have no bounds: an index outside
reads or breaks anything. W is `target.WIDTH`. No operation is reordered, except where `total` adds
the W numbers of a vector.
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from itertools import repeat
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic

from fl_privacy_lib.federated.compiled.target import WIDTH as W

FLOAT, INT, BYTE, BIT = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(1)
ELEMENTS = {
    types.float32: FLOAT,
    types.int32: INT,
    types.uint32: INT,
    types.uint8: BYTE,
    types.int64: ir.IntType(64),
}


class Lanes(types.Type):
    """W numbers of one kind: floats, integers of 32 bits, or the bits of a mask."""

    def __init__(self, kind: Any) -> None:
        self.vector = ir.VectorType(kind, W)
        super().__init__(f"Lanes({kind}, {W})")


@register_default(Lanes)
class LanesModel(PrimitiveModel):
    """A vector lies in one register (LLVM's ``<W x float>``)."""

    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, lanes.vector)


FLOATS, INTS, BITS = Lanes(FLOAT), Lanes(INT), Lanes(BIT)


def operation(
    result: Callable[..., types.Type], emit: Callable[..., Any], names: Sequence[str] = ()
) -> Any:
    """Make an operation for kernels of ``emit(builder, types, *values)``, which writes LLVM code.

    `result` gives the type that it returns, of the arguments' types; `names` are theirs, if they do
    not stand in `emit`. An array comes as the pointer to its first number.
    """

    def typed(context: Any, *given: Any) -> Any:
        kind = result(*given)

        def lower(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            data = (
                context.make_array(t)(context, builder, v).data if isinstance(t, types.Array) else v
                for t, v in zip(given, values, strict=True)
            )
            done = emit(builder, given, *data)
            return context.get_dummy_value() if kind is types.void else done

        return kind(*given), lower

    # numba asks for named arguments
    names = ["context", *(names or list(signature(emit).parameters)[2:])]
    parameters = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(prefer_literal=True)(typed)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    """Emit a vector of W times the same number, as a float or an integer of 32 bits."""
    if value.type != kind:
        value = builder.fptrunc(value, kind) if kind == FLOAT else builder.trunc(value, kind)
    one = builder.insert_element(ir.Constant(ir.VectorType(kind, W), ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS.vector, [0] * W))


def _first(*given: Any) -> Any:
    """Return the first kind of vector among the arguments' types, a mask's apart."""
    kinds = (t.dtype if isinstance(t, types.UniTuple) else t for t in given)
    return next(t for t in kinds if isinstance(t, Lanes) and t is not BITS)


def each(emit: Callable[..., Any], one: Callable[..., Any] = _first) -> Any:
    """Make an operation that goes vector by vector through blocks.

    A vector or a number beside a block serves all its vectors. `one` gives the kind of a result's
    vector.
    """

    def result(*given: Any) -> Any:
        counts = [t.count for t in given if isinstance(t, types.UniTuple)]
        return types.UniTuple(one(*given), counts[0]) if counts else one(*given)

    def emit_all(builder: Any, given: Any, *values: Any) -> Any:
        parts: list[Any] = []
        for t, v in zip(given, values, strict=True):
            number = not isinstance(t, (Lanes, types.UniTuple))
            v = _spread(builder, v, _first(*given).vector.element) if number else v
            parts.append(
                cgutils.unpack_tuple(builder, v) if isinstance(t, types.UniTuple) else repeat(v)
            )
        if not isinstance(result(*given), types.UniTuple):
            return emit(builder, *map(next, parts))
        return cgutils.pack_array(builder, [emit(builder, *p) for p in zip(*parts, strict=False)])

    return operation(result, emit_all, list(signature(emit).parameters)[1:])


def _method(of_floats: str, of_ints: str = "") -> Any:
    """Make the operation that LLVM has as an instruction for two vectors."""
    return each(lambda b, x, y: getattr(b, of_floats if x.type == FLOATS.vector else of_ints)(x, y))


def _call(builder: Any, name: str, result: Any, *values: Any, **flags: Any) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{W}f32"),
        values,
        **flags,
    )


# sum, difference, product; the differing and the common bits; shifts, the last of which keeps the
# sign
add, sub, mul = _method("fadd", "add"), _method("fsub", "sub"), _method("fmul")
xor, both = _method("", "xor"), _method("", "and_")
left, right, right_signed = _method("", "shl"), _method("", "lshr"), _method("", "ashr")
# x y + z rounded once; √x; integers as floats; the same bits as another kind
fma = each(lambda b, x, y, z: _call(b, "fma", FLOATS.vector, x, y, z))
root = each(lambda b, x: _call(b, "sqrt", FLOATS.vector, x))
to_float = each(lambda b, x: b.sitofp(x, FLOATS.vector), lambda x: FLOATS)
as_float = each(lambda b, x: b.bitcast(x, FLOATS.vector), lambda x: FLOATS)
as_int = each(lambda b, x: b.bitcast(x, INTS.vector), lambda x: INTS)
# masks: where x > y or either is no number; where two integers are equal; x where the mask is set,
# else y
above = each(lambda b, x, y: b.fcmp_unordered(">", x, y), lambda x, y: BITS)
same = each(lambda b, x, y: b.icmp_signed("==", x, y), lambda x, y: BITS)
choose = each(lambda b, mask, x, y: b.select(mask, x, y))
# W times a number; the sum of W numbers
spread = operation(lambda x: FLOATS, lambda b, t, x: _spread(b, x, FLOAT))
spread_int = operation(lambda x: INTS, lambda b, t, x: _spread(b, x, INT))
total = operation(lambda x: types.float32, lambda b, t, x: _call(
    b, "vector.reduce.fadd", FLOAT, FLOAT(0.0), x, fastmath=("reassoc",)))  # fmt: skip


# ---- memory: at(array or pointer, index) is a pointer; codes are bytes there, integers in a vector


def _kind(pointer: Any, *_: Any) -> Any:
    """Return what a vector read from there is."""
    return FLOATS if pointer.dtype is types.float32 else INTS


def _at(builder: Any, given: Any, pointer: Any, *steps: Any) -> Any:
    for step in steps:
        pointer = builder.gep(pointer, [step], source_etype=ELEMENTS[given.dtype])
    return pointer


def _load(builder: Any, given: Any, place: Any) -> Any:
    vector = ir.VectorType(ELEMENTS[given.dtype], W)
    value = builder.load(builder.bitcast(place, vector.as_pointer()), align=1, typ=vector)
    return builder.zext(value, INTS.vector) if given.dtype is types.uint8 else value


def _store(builder: Any, given: Any, place: Any, value: Any) -> None:
    value = builder.trunc(value, ir.VectorType(BYTE, W)) if given.dtype is types.uint8 else value
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)


at = operation(lambda p, i: types.CPointer(p.dtype), lambda b, t, p, i: _at(b, t[0], p, i))
load = operation(_kind, lambda b, t, p, i: _load(b, t[0], _at(b, t[0], p, i)))
store = operation(
    lambda p, i, x: types.void, lambda b, t, p, i, x: _store(b, t[0], _at(b, t[0], p, i), x)
)


# ---- blocks of rows · columns vectors; both are constants


def _block(rows: Any, columns: Any, *place: Any) -> Any:
    return types.UniTuple(
        _kind(*place) if place else FLOATS, rows.literal_value * columns.literal_value
    )


def _grid(
    builder: Any, given: Any, count: int, columns: int, p: Any, i: Any, row: Any, column: Any
) -> list[Any]:
    """Emit the addresses of a grid's places, rows and columns `row` and `column` floats apart."""
    long = ir.IntType(64)
    steps = [
        (builder.mul(row, long(k // columns)), builder.mul(column, long(k % columns)))
        for k in range(count)
    ]
    return [_at(builder, given, p, i, *step) for step in steps]


def _reading(read: Callable[..., Any]) -> Any:
    """Make the operation f(rows, columns, pointer, index, row, column) that reads a grid."""

    def emit(builder, given, rows, columns, pointer, index, row, column):
        width = given[1].literal_value
        places = _grid(
            builder, given[2], given[0].literal_value * width, width, pointer, index, row, column
        )
        return cgutils.pack_array(builder, [read(builder, given[2], place) for place in places])

    return operation(_block, emit)


def _store_all(builder, given, block, columns, pointer, index, row, column):
    places = _grid(
        builder, given[2], given[0].count, given[1].literal_value, pointer, index, row, column
    )
    for place, part in zip(places, cgutils.unpack_tuple(builder, block), strict=True):
        _store(builder, given[2], place, part)


def _outer(builder, given, block, a, b):
    sums, rows, row = (cgutils.unpack_tuple(builder, x) for x in (block, a, b))
    pairs = [(x, y) for x in rows for y in row]
    fused = [
        _call(builder, "fma", FLOATS.vector, *xy, z) for xy, z in zip(pairs, sums, strict=True)
    ]
    return cgutils.pack_array(builder, fused)


def _transposed(builder, given, block):
    rows, step = cgutils.unpack_tuple(builder, block), 1
    while step < W:
        for i in (i for i in range(W) if not i & step):
            low = [lane + W - step if lane & step else lane for lane in range(W)]
            high = [lane + W if lane & step else lane + step for lane in range(W)]
            a, b = rows[i], rows[i + step]
            rows[i], rows[i + step] = (
                builder.shuffle_vector(a, b, ir.Constant(INTS.vector, s)) for s in (low, high)
            )
        step *= 2
    return cgutils.pack_array(builder, rows)


# zeros(rows, columns); the vectors at a grid's places; W times the number there
zeros = operation(_block, lambda b, t, rows, columns: ir.Constant(ir.ArrayType(
    FLOATS.vector, t[0].literal_value * t[1].literal_value), None))  # fmt: skip
loads = _reading(_load)
numbers = _reading(lambda b, t, place: _spread(b, b.load(place, typ=FLOAT), FLOAT))
# stores(block, columns, pointer, index, row, column); block [rows, columns] + a [rows] · b
# [columns]; W vectors, with their rows and columns exchanged
stores = operation(lambda *given: types.void, _store_all)
outer = operation(lambda block, a, b: block, _outer)
transposed = operation(lambda block: block, _transposed)
