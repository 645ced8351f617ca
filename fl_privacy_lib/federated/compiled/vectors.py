"""Vectors of W floats for numba: what a kernel does with them stays in registers.

numba's loops over arrays spill their sums to memory; explicit vectors do not. A block of sums is a tuple of vectors,
and one operation here updates a whole block, unrolled. Pointers have no bounds: an index outside reads or breaks
anything. W is `target.WIDTH`. No operation is reordered, except where `total` adds the W numbers of a vector.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic

from fl_privacy_lib.federated.compiled.target import WIDTH

W = WIDTH
FLOAT, INT, BYTE, BIT = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(1)


class Lanes(types.Type):
    """W numbers of one kind: 'float', 'int' (32 bits, signed) or 'bit' (a mask)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"Lanes({kind}, {W})")


@register_default(Lanes)
class LanesModel(PrimitiveModel):
    """A vector lies in one register (LLVM's ``<W x float>``)."""

    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.VectorType({"float": FLOAT, "int": INT, "bit": BIT}[lanes.kind], W))


FLOATS, INTS, BITS = Lanes("float"), Lanes("int"), Lanes("bit")
_F, _I, _B = (ir.VectorType(kind, W) for kind in (FLOAT, INT, BYTE))
FLOAT_POINTER, INT_POINTER = types.CPointer(types.float32), types.CPointer(types.int32)
LONG_POINTER, BYTE_POINTER = types.CPointer(types.int64), types.CPointer(types.uint8)
ELEMENTS = {FLOAT_POINTER: FLOAT, INT_POINTER: INT, LONG_POINTER: ir.IntType(64), BYTE_POINTER: BYTE}


def operation(result: types.Type | Callable[..., types.Type], emit: Callable[..., Any]) -> Any:
    """Make an operation for kernels of ``emit(builder, types, *values)``, which writes its LLVM instructions.

    `result` is the type that it returns, or a function from the arguments' types to it.
    """

    def typed(*given: Any) -> Any:
        kind = result if isinstance(result, types.Type) else result(*given)

        def lower(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
            done = emit(builder, given, *values)
            return context.get_dummy_value() if kind is types.void else done

        return kind(*given), lower

    names = ", ".join(list(signature(emit).parameters)[2:])  # numba asks for named arguments
    return intrinsic(prefer_literal=True)(eval(f"lambda context, {names}: typed({names})", {"typed": typed}))


def unrolled(result: types.Type | Callable[..., types.Type]) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of the function below."""
    return partial(operation, result)


def _block(*given: Any) -> Any:
    """Return the type of a block of as many vectors as the first argument says, or has."""
    count = getattr(given[0], "literal_value", None) or given[0].count
    return types.UniTuple(FLOATS, count)


def _spread(builder: Any, value: Any) -> Any:
    """Emit a vector of W times the same number."""
    vector = ir.VectorType(value.type, W)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, W), [0] * W))


def _at(builder: Any, pointer: Any, *steps: Any) -> Any:
    for step in steps:
        step = ir.IntType(64)(step) if isinstance(step, int) else step
        pointer = builder.gep(pointer, [step], source_etype=FLOAT)
    return pointer


def _load(builder: Any, pointer: Any, *steps: Any) -> Any:
    place = builder.bitcast(_at(builder, pointer, *steps), _F.as_pointer())
    return builder.load(place, align=4, typ=_F)


def _store(builder: Any, value: Any, pointer: Any, *steps: Any) -> None:
    builder.store(value, builder.bitcast(_at(builder, pointer, *steps), _F.as_pointer()), align=4)


def _number(builder: Any, pointer: Any, *steps: Any) -> Any:
    """Emit a vector of W times the number in memory."""
    return _spread(builder, builder.load(_at(builder, pointer, *steps), typ=FLOAT))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{W}f32", _F, a, b, c)


def _call(builder: Any, name: str, vector: Any, *values: Any, **flags: Any) -> Any:
    kind = ir.FunctionType(vector, [v.type for v in values])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, values, **flags)


def _parts(builder: Any, block: Any) -> list[Any]:
    return cgutils.unpack_tuple(builder, block)


def _whole(builder: Any, parts: Sequence[Any]) -> Any:
    return cgutils.pack_array(builder, list(parts))


def _place(builder: Any, kind: Any, pointer: Any, index: Any) -> Any:
    """Emit the address of a vector at an index of its elements."""
    return builder.bitcast(builder.gep(pointer, [index], source_etype=kind.element), kind.as_pointer())


def _read(builder: Any, kind: Any, pointer: Any, index: Any) -> Any:
    return builder.load(_place(builder, kind, pointer, index), align=1, typ=kind)


def _cast(builder: Any, value: Any, kind: Any) -> Any:
    """Emit a number as a float or integer of 32 bits."""
    if value.type == kind:
        return value
    return builder.fptrunc(value, kind) if kind == FLOAT else builder.trunc(value, kind)


def _pointer(kind: types.CPointer) -> Any:
    return operation(kind, lambda b, t, address: b.inttoptr(address, ELEMENTS[kind].as_pointer()))


def _shift(method: str) -> Any:
    return operation(INTS, lambda b, t, x, count: getattr(b, method)(x, _I([t[1].literal_value] * W)))


# pointers: from an address; `step` elements further on
floats, ints, longs, codes = map(_pointer, (FLOAT_POINTER, INT_POINTER, LONG_POINTER, BYTE_POINTER))
after = operation(lambda p, step: p, lambda b, t, p, step: b.gep(p, [step], source_etype=ELEMENTS[t[0]]))

# one vector in memory: load(pointer, index), store(pointer, index, vector); codes are bytes there and integers here
load = operation(FLOATS, lambda b, t, p, i: _load(b, p, i))
store = operation(types.void, lambda b, t, p, i, x: _store(b, x, p, i))
load_ints = operation(INTS, lambda b, t, p, i: _read(b, _I, p, i))
store_ints = operation(types.void, lambda b, t, p, i, x: b.store(x, _place(b, _I, p, i), align=1))
load_codes = operation(INTS, lambda b, t, p, i: b.zext(_read(b, _B, p, i), _I))
store_codes = operation(types.void, lambda b, t, p, i, x: b.store(b.trunc(x, _B), _place(b, _B, p, i), align=1))

# one vector: W times a number; x y + z rounded once; sum, difference, product; √x; the sum of the W numbers
spread = operation(FLOATS, lambda b, t, x: _spread(b, _cast(b, x, FLOAT)))
spread_int = operation(INTS, lambda b, t, x: _spread(b, _cast(b, x, INT)))
fma = operation(FLOATS, lambda b, t, x, y, z: _fma(b, x, y, z))
add = operation(lambda x, y: x, lambda b, t, x, y: b.fadd(x, y) if t[0] is FLOATS else b.add(x, y))
sub = operation(lambda x, y: x, lambda b, t, x, y: b.fsub(x, y) if t[0] is FLOATS else b.sub(x, y))
mul = operation(FLOATS, lambda b, t, x, y: b.fmul(x, y))
root = operation(FLOATS, lambda b, t, x: _call(b, f"llvm.sqrt.v{W}f32", _F, x))
total = operation(types.float32, lambda b, t, x: _call(
    b, f"llvm.vector.reduce.fadd.v{W}f32", FLOAT, FLOAT(0.0), x, fastmath=("reassoc",)))  # fmt: skip

# masks: where x > y or either is no number; where two integers are equal; x where the mask is set, else y
above = operation(BITS, lambda b, t, x, y: b.fcmp_unordered(">", x, y))
same = operation(BITS, lambda b, t, x, y: b.icmp_signed("==", x, y))
choose = operation(lambda mask, x, y: x, lambda b, t, mask, x, y: b.select(mask, x, y))

# bits: the differing and the common ones; shifts by a constant; numbers as floats; the same bits as another kind
xor = operation(INTS, lambda b, t, x, y: b.xor(x, y))
both = operation(INTS, lambda b, t, x, y: b.and_(x, y))
left, right, right_signed = map(_shift, ("shl", "lshr", "ashr"))
to_float = operation(FLOATS, lambda b, t, x: b.sitofp(x, _F))
as_float = operation(FLOATS, lambda b, t, x: b.bitcast(x, _F))
as_int = operation(INTS, lambda b, t, x: b.bitcast(x, _I))


# ---- blocks


@unrolled(_block)
def zeros(builder, given, count):
    """Return a block of `count` (a constant) vectors of zeros."""
    return _whole(builder, [ir.Constant(_F, [0.0] * W)] * given[0].literal_value)


@unrolled(_block)
def loads(builder, given, count, pointer, index, stride):
    """Return `count` (a constant) vectors that begin `stride` floats apart."""
    step = given[3].literal_value
    return _whole(builder, [_load(builder, pointer, index, k * step) for k in range(given[0].literal_value)])


@unrolled(types.void)
def stores(builder, given, block, pointer, index, stride):
    """Write the vectors of a block, each `stride` (a constant) floats after the one before."""
    for k, part in enumerate(_parts(builder, block)):
        _store(builder, part, pointer, index, k * given[3].literal_value)


@unrolled(_block)
def axpy(builder, given, block, factor, other):
    """Return block + factor · other, for a number and two blocks."""
    f = _spread(builder, factor)
    pairs = zip(_parts(builder, block), _parts(builder, other), strict=True)
    return _whole(builder, [_fma(builder, f, b, a) for a, b in pairs])


@unrolled(_block)
def multiply_add(builder, given, block, a, b):
    """Return block + a · b, vector by vector, for three blocks."""
    parts = zip(_parts(builder, block), _parts(builder, a), _parts(builder, b), strict=True)
    return _whole(builder, [_fma(builder, p, q, c) for c, p, q in parts])


@unrolled(FLOATS)
def squares(builder, given, block, value):
    """Return value + the sum of the block's squares, lane by lane."""
    for part in _parts(builder, block):
        value = _fma(builder, part, part, value)
    return value


@unrolled(_block)
def outer(builder, given, block, rows, a, i, stride, b, j):
    """Return the block [rows, vectors] + a column of a times a row of b.

    The column's `rows` numbers lie `stride` apart from index i on, the row's vectors side by side from index j on.
    """
    sums, count = _parts(builder, block), given[1].literal_value
    width = len(sums) // count
    row = [_load(builder, b, j, v * W) for v in range(width)]
    place = _at(builder, a, i)
    for r in range(count):
        number = _number(builder, place)
        place = _at(builder, place, stride)
        for v in range(width):
            sums[r * width + v] = _fma(builder, number, row[v], sums[r * width + v])
    return _whole(builder, sums)


@unrolled(_block)
def taps(builder, given, block, factor, pointer, index, row, column):
    """Return nine sums + factor times the 3×3 vectors whose rows and columns lie `row` and `column` floats apart."""
    sums, f = _parts(builder, block), _spread(builder, factor)
    for tap in range(9):
        sums[tap] = _fma(builder, f, _load(builder, _tap(builder, pointer, index, row, column, tap)), sums[tap])
    return _whole(builder, sums)


def _tap(builder: Any, pointer: Any, index: Any, row: Any, column: Any, tap: int) -> Any:
    place = _at(builder, pointer, index)
    place = _at(builder, place, builder.mul(row, row.type(tap // 3)))
    return _at(builder, place, builder.mul(column, column.type(tap % 3)))


@unrolled(types.void)
def add_taps(builder, given, block, pointer, index, row, column):
    """Add nine vectors to the 3×3 vectors in memory."""
    for tap, part in enumerate(_parts(builder, block)):
        place = _tap(builder, pointer, index, row, column, tap)
        _store(builder, builder.fadd(_load(builder, place), part), place)


@unrolled(_block)
def windows(builder, given, block, weights, j, image, i, row):
    """Return the sums of a 3×3 convolution at the four positions of a pooling window, for two vectors of channels.

    The block is [channels / W, position]; weights lie tap by tap, 32 channels each; the window's first pixel at i.
    """
    sums = _parts(builder, block)
    for tap in range(9):
        w = [_load(builder, weights, j, tap * 32 + v * W) for v in range(2)]
        for position in range(4):
            pixel = _pixel(builder, image, i, row, tap, position)
            for v in range(2):
                sums[4 * v + position] = _fma(builder, pixel, w[v], sums[4 * v + position])
    return _whole(builder, sums)


@unrolled(_block)
def window_gradients(builder, given, block, parts, image, i, row):
    """Return nine sums + each tap's pixels times the gradient's parts at a window's four positions."""
    sums, pieces = _parts(builder, block), _parts(builder, parts)
    for tap in range(9):
        for position in range(4):
            pixel = _pixel(builder, image, i, row, tap, position)
            sums[tap] = _fma(builder, pixel, pieces[position], sums[tap])
    return _whole(builder, sums)


def _pixel(builder: Any, image: Any, i: Any, row: Any, tap: int, position: int) -> Any:
    place = _at(builder, image, i)
    place = _at(builder, place, builder.mul(row, row.type(tap // 3 + position // 2)))
    return _number(builder, place, tap % 3 + position % 2)


@unrolled(_block)
def transposed(builder, given, block):
    """Return W vectors of W numbers with rows and columns exchanged."""
    rows, step = _parts(builder, block), 1
    while step < W:
        for i in range(W):
            if not i & step:
                a, b = rows[i], rows[i + step]
                low = [lane + W - step if lane & step else lane for lane in range(W)]
                high = [lane + W if lane & step else lane + step for lane in range(W)]
                rows[i] = builder.shuffle_vector(a, b, ir.Constant(_I, low))
                rows[i + step] = builder.shuffle_vector(a, b, ir.Constant(_I, high))
        step *= 2
    return _whole(builder, rows)
