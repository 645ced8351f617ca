"""Vectors of W floats for numba: what a kernel does with them stays in registers.

numba's loops over arrays spill their sums to memory; explicit vectors do not. A block of sums is a tuple of vectors,
and one operation here updates a whole block, unrolled. Pointers have no bounds: an index outside reads or breaks
anything. W is `target.WIDTH`. No operation is reordered, except where `total` adds the W numbers of a vector.
"""

from collections.abc import Callable, Sequence
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
_F, _I = ir.VectorType(FLOAT, W), ir.VectorType(INT, W)
FLOAT_POINTER, INT_POINTER = types.CPointer(types.float32), types.CPointer(types.int32)
LONG_POINTER, BYTE_POINTER = types.CPointer(types.int64), types.CPointer(types.uint8)
ELEMENTS = {FLOAT_POINTER: FLOAT, INT_POINTER: INT, LONG_POINTER: ir.IntType(64), BYTE_POINTER: BYTE}


def operation(result: types.Type | Callable[..., types.Type]) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation for kernels of ``emit(builder, types, *values)``, which writes its LLVM instructions.

    `result` is the type that it returns, or a function from the arguments' types to it.
    """

    def define(emit: Callable[..., Any]) -> Any:
        def typed(*given: Any) -> Any:
            kind = result if isinstance(result, types.Type) else result(*given)

            def lower(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
                done = emit(builder, given, *values)
                return context.get_dummy_value() if kind is types.void else done

            return kind(*given), lower

        names = ", ".join(list(signature(emit).parameters)[2:])  # numba asks for named arguments
        definition = eval(f"lambda context, {names}: typed({names})", {"typed": typed})
        definition.__name__ = emit.__name__
        definition.__doc__ = emit.__doc__
        return intrinsic(prefer_literal=True)(definition)

    return define


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


# ---- pointers


def _address(pointer: Any, name: str) -> Any:
    def emit(builder: Any, given: Any, address: Any) -> Any:
        return builder.inttoptr(address, ELEMENTS[pointer].as_pointer())

    emit.__name__, emit.__doc__ = name, "Return the pointer to an address."
    return operation(pointer)(emit)


floats, ints = _address(FLOAT_POINTER, "floats"), _address(INT_POINTER, "ints")
longs, codes = _address(LONG_POINTER, "longs"), _address(BYTE_POINTER, "codes")


@operation(lambda pointer, step: pointer)
def after(builder, given, pointer, step):
    """Return the pointer `step` elements further on."""
    return builder.gep(pointer, [step], source_etype=ELEMENTS[given[0]])


# ---- one vector


@operation(FLOATS)
def load(builder, given, pointer, index):
    """Return the W floats from an index on."""
    return _load(builder, pointer, index)


@operation(types.void)
def store(builder, given, pointer, index, value):
    """Write W floats from an index on."""
    _store(builder, value, pointer, index)


@operation(FLOATS)
def spread(builder, given, value):
    """Return W times the same float."""
    return _spread(builder, builder.fptrunc(value, FLOAT) if value.type != FLOAT else value)


@operation(INTS)
def spread_int(builder, given, value):
    """Return W times the same integer."""
    return _spread(builder, builder.trunc(value, INT) if value.type.width > 32 else value)


@operation(FLOATS)
def fma(builder, given, a, b, c):
    """Return a b + c, rounded once."""
    return _fma(builder, a, b, c)


@operation(lambda a, b: a)
def add(builder, given, a, b):
    """Return a + b."""
    return builder.fadd(a, b) if given[0] is FLOATS else builder.add(a, b)


@operation(lambda a, b: a)
def sub(builder, given, a, b):
    """Return a − b."""
    return builder.fsub(a, b) if given[0] is FLOATS else builder.sub(a, b)


@operation(FLOATS)
def mul(builder, given, a, b):
    """Return a b."""
    return builder.fmul(a, b)


@operation(FLOATS)
def root(builder, given, a):
    """Return √a."""
    return _call(builder, f"llvm.sqrt.v{W}f32", _F, a)


@operation(types.float32)
def total(builder, given, a):
    """Return the sum of the W numbers."""
    return _call(builder, f"llvm.vector.reduce.fadd.v{W}f32", FLOAT, FLOAT(0.0), a, fastmath=("reassoc",))


@operation(BITS)
def above(builder, given, a, b):
    """Return where a > b, or either is no number."""
    return builder.fcmp_unordered(">", a, b)


@operation(BITS)
def same(builder, given, a, b):
    """Return where two integers are equal."""
    return builder.icmp_signed("==", a, b)


@operation(lambda mask, a, b: a)
def choose(builder, given, mask, a, b):
    """Return a where the mask is set, b elsewhere."""
    return builder.select(mask, a, b)


# ---- integers


@operation(INTS)
def load_ints(builder, given, pointer, index):
    """Return the W integers from an index on."""
    place = builder.gep(pointer, [index], source_etype=INT)
    return builder.load(builder.bitcast(place, _I.as_pointer()), align=4, typ=_I)


@operation(types.void)
def store_ints(builder, given, pointer, index, value):
    """Write W integers from an index on."""
    place = builder.gep(pointer, [index], source_etype=INT)
    builder.store(value, builder.bitcast(place, _I.as_pointer()), align=4)


@operation(INTS)
def load_codes(builder, given, pointer, index):
    """Return the W bytes from an index on, as integers."""
    kind = ir.VectorType(BYTE, W)
    place = builder.gep(pointer, [index], source_etype=BYTE)
    return builder.zext(builder.load(builder.bitcast(place, kind.as_pointer()), align=1, typ=kind), _I)


@operation(types.void)
def store_codes(builder, given, pointer, index, value):
    """Write W integers as bytes, from an index on."""
    kind = ir.VectorType(BYTE, W)
    place = builder.gep(pointer, [index], source_etype=BYTE)
    builder.store(builder.trunc(value, kind), builder.bitcast(place, kind.as_pointer()), align=1)


@operation(INTS)
def xor(builder, given, a, b):
    """Return the bits in which a and b differ."""
    return builder.xor(a, b)


@operation(INTS)
def both(builder, given, a, b):
    """Return the bits that a and b have in common."""
    return builder.and_(a, b)


@operation(INTS)
def left(builder, given, a, count):
    """Return a shifted to the left by a constant."""
    return builder.shl(a, _I([given[1].literal_value] * W))


@operation(INTS)
def right(builder, given, a, count):
    """Return a shifted to the right by a constant, zeros coming in."""
    return builder.lshr(a, _I([given[1].literal_value] * W))


@operation(INTS)
def right_signed(builder, given, a, count):
    """Return a shifted to the right by a constant, copies of the sign coming in."""
    return builder.ashr(a, _I([given[1].literal_value] * W))


@operation(FLOATS)
def to_float(builder, given, a):
    """Return integers as floats."""
    return builder.sitofp(a, _F)


@operation(FLOATS)
def as_float(builder, given, a):
    """Return the floats of which these are the bits."""
    return builder.bitcast(a, _F)


@operation(INTS)
def as_int(builder, given, a):
    """Return the bits of floats."""
    return builder.bitcast(a, _I)


# ---- blocks


@operation(_block)
def zeros(builder, given, count):
    """Return a block of `count` (a constant) vectors of zeros."""
    return _whole(builder, [ir.Constant(_F, [0.0] * W)] * given[0].literal_value)


@operation(_block)
def loads(builder, given, count, pointer, index, stride):
    """Return `count` (a constant) vectors that begin `stride` floats apart."""
    step = given[3].literal_value
    return _whole(builder, [_load(builder, pointer, index, k * step) for k in range(given[0].literal_value)])


@operation(types.void)
def stores(builder, given, block, pointer, index, stride):
    """Write the vectors of a block, each `stride` (a constant) floats after the one before."""
    for k, part in enumerate(_parts(builder, block)):
        _store(builder, part, pointer, index, k * given[3].literal_value)


@operation(_block)
def axpy(builder, given, block, factor, other):
    """Return block + factor · other, for a number and two blocks."""
    f = _spread(builder, factor)
    pairs = zip(_parts(builder, block), _parts(builder, other), strict=True)
    return _whole(builder, [_fma(builder, f, b, a) for a, b in pairs])


@operation(_block)
def multiply_add(builder, given, block, a, b):
    """Return block + a · b, vector by vector, for three blocks."""
    parts = zip(_parts(builder, block), _parts(builder, a), _parts(builder, b), strict=True)
    return _whole(builder, [_fma(builder, p, q, c) for c, p, q in parts])


@operation(FLOATS)
def squares(builder, given, block, value):
    """Return value + the sum of the block's squares, lane by lane."""
    for part in _parts(builder, block):
        value = _fma(builder, part, part, value)
    return value


@operation(_block)
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


@operation(_block)
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


@operation(types.void)
def add_taps(builder, given, block, pointer, index, row, column):
    """Add nine vectors to the 3×3 vectors in memory."""
    for tap, part in enumerate(_parts(builder, block)):
        place = _tap(builder, pointer, index, row, column, tap)
        _store(builder, builder.fadd(_load(builder, place), part), place)


@operation(_block)
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


@operation(_block)
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


@operation(_block)
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
