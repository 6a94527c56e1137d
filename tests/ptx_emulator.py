"""Inline PTX in Triton's interpreter, which has none of its own.

`install()` makes `tl.inline_asm_elementwise(..., pack=1)` run in numpy, for kernels with one element a thread: each
tensor has the shape (32 * warps,), and element r belongs to lane r % 32 of warp r // 32. A register is an array of that
shape, of uint32 (or uint64, or bool for predicates), which each instruction views as the type it names.

A text is read once and becomes a list of functions of the registers. An unknown instruction raises NotImplementedError.
ValueError is for what would fail or give wrong values on a GPU: operands that ptxas refuses, registers declared outside
of `{ }` (a second copy of the text would declare them again), and inputs read after an output without `&` is written
(the compiler may have put both into one register).
"""

import functools
import re
import struct

import numpy as np

LANES = np.arange(32)
TYPES = {
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (32, 64)},
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (32, 64)},
    "pred": np.dtype(bool),
}
CONSTRAINTS = {"r": "b32", "f": "f32", "l": "b64", "d": "f64"}  # letter to the type of its register
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
COMPARE["ge"] = np.greater_equal
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
# numpy shifts everything out where a count is 32 or more, as PTX does
SHIFTS = {("shl", "b32"): np.left_shift, ("shr", "u32"): np.right_shift, ("shr", "b32"): np.right_shift}
SHIFTS["shr", "s32"] = np.right_shift
MMA = re.compile(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32")
NO_OPERATION = re.compile(r"(bar|barrier|membar|fence)\..*|cp\.async\.(commit|wait)_group")


def flush(x):
    """Turns float32 subnormals into zeros of the same sign."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def multiply_add(a, b, c):
    """Computes a * b + c in float32, rounded once."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    total = np.atleast_1d(product + c)
    back = total - product
    error = (product - (total - back)) + (c - back)
    # Rounded to odd, a float64 rounds to the float32 that the exact sum rounds to.
    bits = total.view(np.int64)
    odd = np.where((np.abs(error) > 0) & (bits & 1 == 0), np.where((error > 0) == (total > 0), 1, -1), 0)
    return (bits + odd).view(np.float64).astype(np.float32)


def half_bits(x, kind):
    """Rounds float32 x to the nearest bf16 or f16, ties to even, in the low 16 bits of uint32."""
    if kind == "f16":
        return np.where(np.isnan(x), np.uint32(0x7FFF), x.astype(np.float16).view(np.uint16).astype(np.uint32))
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFF), (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16)


def to_tf32(x):
    """Rounds float32 x to the nearest tf32, ties away from zero."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000))


UNARY = {
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "rcp.approx": np.reciprocal,
    "tanh.approx": np.tanh,
}


def multiply_matrices(kind, words, registers):
    """The four registers of a (16, 8) product for each warp. `registers` are 2 * words / 4 of a, words / 4 of b and 4
    of c, each (32 * warps,). A row of a has `words` uint32s. All kinds lie alike: lane 4 * row + t has the words t and
    t + 4 of a row of a, or of a column of b."""
    blocks = words // 4
    warps = registers[0].shape[0] // 32
    both = np.empty((warps, 3, 8, blocks, 4), np.uint32)  # the upper rows of a, its lower ones, and b transposed
    for block in range(blocks):
        for part, register in enumerate((2 * block, 2 * block + 1, 2 * blocks + block)):
            both[:, part, :, block] = registers[register].reshape(warps, 8, 4)
    both = both.reshape(warps, 24, words)
    if kind == "tf32":
        both &= np.uint32(0xFFFFE000)
        values = both.view(np.float32)
    elif kind == "f16":
        values = both.view(np.float16)
    else:
        values = (both.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float64)
    product = np.matmul(values[:, :16], values[:, 16:].transpose(0, 2, 1)).reshape(warps, 2, 8, 4, 2)
    c = np.empty((warps, 2, 8, 4, 2), np.float32)
    for i, register in enumerate(registers[-4:]):
        c[:, i // 2, :, :, i % 2] = register.view(np.float32).reshape(warps, 8, 4)
    product += c
    d = product.astype(np.float32).view(np.uint32)
    return [d[:, i // 2, :, :, i % 2].reshape(-1) for i in range(4)]


SHARED = np.full(48 << 8, 0x7FC00000, np.uint32)  # 48 KiB; not a number until something is stored


def store_shared(address, a, b):
    for i, value in enumerate((a, b)):
        SHARED[address // 4 + i] = value.view(np.uint32)
    return []


def load_words(count):
    return lambda address: [SHARED[address // 4 + i] for i in range(count)]


def copy_words(words):
    """cp.async, with a copy that arrives at once."""

    def copy(address, source, _, size):
        from triton._C.libtriton import interpreter

        address, source, size = np.broadcast_arrays(address, source, size)
        if (source[size > 0] % (4 * words)).any() or (address % (4 * words)).any():
            raise ValueError(f"cp.async of {words} words to or from an address that is no multiple of their size")
        none = np.zeros(len(source), np.int32)
        for i in range(words):
            SHARED[address // 4 + i] = interpreter.load(source + 4 * i, size > 0, none, np.dtype(np.int32)).view(
                np.uint32
            )
        return []

    return copy


def store_words(address, *words, guard):
    from triton._C.libtriton import interpreter

    if (address[guard] % (4 * len(words))).any():
        raise ValueError(f"a store of {len(words)} words to an address that is no multiple of their size")
    for i, word in enumerate(words):
        interpreter.store(address + np.uint64(4 * i), np.ascontiguousarray(word).view(np.int32), guard)


def transpose_matrices(a):
    """movmatrix: transposes an (8, 8) matrix of 16 bits for each warp, which lies in (32 * warps,) uint32s."""
    matrix = np.ascontiguousarray(a).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(matrix.transpose(0, 2, 1)).view(np.uint32).reshape(-1)


def source_lanes(mode, b, c):
    """shfl: the lane that each of 32 lanes reads. b and c broadcast with (warps, 32)."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    first, last = LANES & segment, (LANES & segment) | (clamp & ~segment)
    source = {"idx": first | (b & ~segment), "bfly": LANES ^ b, "up": LANES - b, "down": LANES + b}[mode]
    return np.where(source >= last if mode == "up" else source <= last, source, LANES)


def shuffle(mode, a, b, c):
    warps = a.reshape(-1, 32)
    b, c = (x.reshape(-1, 32) if x.shape[0] > 1 else x for x in (b.astype(np.int64), c.astype(np.int64)))
    source = source_lanes(mode, b, c)
    if source.ndim == 1:  # one choice for every warp
        return warps[:, source].reshape(-1)
    return np.take_along_axis(warps, np.broadcast_to(source, warps.shape), 1).reshape(-1)


def permute(a, b, selector):
    """prmt in its default mode: each byte of the result is one of the eight bytes of a and b, or its sign."""
    eight = np.stack(np.broadcast_arrays(a, b), -1).view(np.int8)
    nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    nibbles = np.broadcast_to(nibbles, (eight.shape[0], 4))
    chosen = np.take_along_axis(eight, (nibbles & 7).astype(np.int64), 1)
    return np.where(nibbles & 8, chosen >> 7, chosen).view(np.uint32).reshape(-1)


class Program:
    """A text and its constraints, parsed once. `run(values, size)` runs it."""

    def __init__(self, text, constraints):
        self.text = text
        self.steps = []  # (function of registers, the registers it reads, those it writes, guard, guard's sign)
        self.types = []  # of each register
        self.start = {}  # register: its value before the text, of shape (1,), or the name of a special register
        self.named = {}
        self.outputs, self.inputs, self.early = [], [], set()
        for constraint in filter(None, (c.strip() for c in constraints.split(","))):
            if constraint.startswith("~"):
                continue
            letter = constraint.lstrip("=&")
            if letter.isdigit():  # an input in the register of an output
                register = self.outputs[int(letter)]
            elif letter in CONSTRAINTS:
                register = self.new(CONSTRAINTS[letter])
            else:
                raise NotImplementedError(f"constraint {constraint!r}")
            (self.outputs if constraint.startswith("=") else self.inputs).append(register)
            if "&" in constraint:
                self.early.add(register)
        self.operands = self.outputs + self.inputs

        depth = 0
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
        for statement in text.split(";"):
            lead = re.match(r"[\s{}]*", statement).group()
            depth += lead.count("{") - lead.count("}")
            statement = statement[len(lead) :].strip()
            if statement.startswith(".shared"):
                self.reserve(statement)
            elif statement.startswith(".reg"):
                if depth < 1:
                    self.refuse(".reg outside of { }")
                self.declare(statement)
            elif statement:
                self.read(statement)
        if depth:
            self.refuse("{ and } do not pair")
        self.check_order()

    def refuse(self, why):
        raise ValueError(f"{why}, in {self.text!r}")

    def new(self, kind):
        self.types.append(kind)
        return len(self.types) - 1

    def declare(self, statement):
        _, kind, names = statement.split(None, 2)
        if kind[1:] not in TYPES:
            raise NotImplementedError(f".reg {kind}")
        for name in names.split(","):
            stem, count = re.fullmatch(r"([\w%$]+)(?:<(\d+)>)?", name.strip()).groups()
            for each in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                if each in self.named:
                    self.refuse(f"{each} declared twice")
                self.named[each] = self.new(kind[1:])

    def reserve(self, statement):
        """Reserves shared memory at address 0: a kernel does so only once. Programs run one after the other, so one
        array serves all."""
        name, size = re.fullmatch(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\]", statement).groups()
        if int(size) > SHARED.nbytes:
            self.refuse(f"{size} bytes of shared memory")
        self.named[name] = self.new("b32")
        self.start[self.named[name]] = np.zeros(1, np.uint32)

    def operand(self, word, kind, written=False):
        """Finds the register of an operand of type `kind`. An immediate gets its own."""
        place = re.fullmatch(r"\$(?:(\d+)|\{(\d+)(?::\w+)?\})", word)
        if place:
            number = int(place[1] or place[2])
            if number >= len(self.operands):
                self.refuse(f"no operand {word}")
            register = self.operands[number]
        elif word in self.named:
            register = self.named[word]
        elif written:
            self.refuse(f"no register {word}")
        elif word.startswith("%"):
            if word not in ("%laneid", "%tid.x"):
                raise NotImplementedError(f"special register {word}")
            register = self.new("u32")
            self.start[register] = word
        else:
            register = self.new(kind)
            self.start[register] = self.immediate(word, kind)
        has = self.types[register]
        # ptxas takes a .b32 for anything of 32 bits, and never a float for an integer
        if TYPES[has].itemsize != TYPES[kind].itemsize or "f" + kind[1:] == has and kind[0] in "us":
            self.refuse(f"{word} is a .{has} for a .{kind}")
        if has[0] in "us" and kind[0] == "f" or (has == "pred") != (kind == "pred"):
            self.refuse(f"{word} is a .{has} for a .{kind}")
        return register

    def immediate(self, word, kind):
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", word) and kind in ("f32", "b32"):
            return np.array([int(word[2:], 16)], np.uint32)
        if kind == "f32" and re.fullmatch(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", word):
            return np.array(struct.unpack("I", struct.pack("f", float(word))), np.uint32)
        if kind[0] in "bus" and re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|[1-9]\d*|0)U?", word):
            bits = 8 * TYPES[kind].itemsize
            return np.array([int(word.rstrip("U"), 0) % 2**bits], f"u{bits // 8}")
        self.refuse(f"{word} is no register and no immediate of type .{kind}")

    def read(self, statement):
        """Adds the step of one instruction."""
        guard, sign = None, True
        if statement.startswith("@"):
            predicate, statement = statement.split(None, 1)
            sign = "!" not in predicate
            guard = self.operand(predicate.lstrip("@!"), "pred")
        opcode, *rest = statement.split(None, 1)
        words = []
        for group, word in re.findall(r"\{\s*([^{}]*?)\s*\}(?=\s*,|\s*$)|((?:\$\{[^}]*\}|[^,{}\s])+)", "".join(rest)):
            words.append([x.strip() for x in group.split(",")] if group else word)
        if NO_OPERATION.fullmatch(opcode):
            return
        found = self.find(opcode, words)
        if found is None:
            raise NotImplementedError(f"PTX instruction {opcode}")
        function, outs, ins = found
        flat = [w.strip("[]") for word in words for w in (word if isinstance(word, list) else [word])]
        if len(flat) != len(outs) + len(ins):
            self.refuse(f"{opcode} takes {len(outs)} + {len(ins)} operands, not {len(flat)}")
        written = [self.operand(w, kind, written=True) for w, kind in zip(flat, outs)]
        sources = [self.operand(w, kind) for w, kind in zip(flat[len(outs) :], ins)]
        views = [None if kind == "pred" else TYPES[kind] for kind in ins]
        self.steps.append((function, list(zip(sources, views)), written, guard, sign))

    def find(self, opcode, words):
        """Finds an instruction: (function, types it writes, types it reads), or None. The function takes arrays of
        shape (32 * warps,) or (1,), and returns one array, or a list if it writes several."""
        mma = MMA.fullmatch(opcode)
        if mma:
            k, kind, other = int(mma[1]), mma[2], mma[3]
            width = {"tf32": k, "bf16": k // 2, "f16": k // 2}.get(kind)
            if kind != other or width not in (4, 8):
                return None
            if [len(w) for w in words if isinstance(w, list)] != [4, width // 2, width // 4, 4]:
                self.refuse(f"{opcode} with operands {words}")
            return (
                lambda *registers: multiply_matrices(kind, width, registers),
                ["f32"] * 4,
                ["u32"] * (3 * width // 4) + ["f32"] * 4,
            )
        load = re.fullmatch(r"ld\.shared(?:\.v([24]))?\.b32", opcode)
        if load:
            count = int(load[1] or 1)
            return load_words(count), ["b32"] * count, ["u32"]
        if opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
            if "cg" in opcode and words[2] != "16":
                self.refuse("only copies of 16 bytes pass by the first cache")
            return copy_words(int(words[2]) // 4), [], ["u32", "u64", "u32", "u32"]
        store = re.fullmatch(r"st\.global\.v([24])\.b32", opcode)
        if store:
            return store_words, [], ["u64"] + ["b32"] * int(store[1])
        if opcode in ("st.shared.v2.f32", "ld.shared.v2.f32"):
            stores = opcode[0] == "s"
            return (store_shared, [], ["u32", "f32", "f32"]) if stores else (load_words(2), ["f32"] * 2, ["u32"])
        if opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
            return transpose_matrices, ["b32"], ["b32"]
        if opcode == "prmt.b32":
            return permute, ["b32"], ["b32"] * 3
        if opcode == "cvt.rna.tf32.f32":
            return to_tf32, ["u32"], ["f32"]
        if opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            kind = opcode.split(".")[2][:-2]
            return (lambda hi, lo: half_bits(hi, kind) << 16 | half_bits(lo, kind)), ["u32"], ["f32"] * 2
        name, *modes = opcode.split(".")
        kind = modes[-1] if modes else ""
        if name == "shfl" and modes[0] == "sync" and len(modes) == 3 and kind == "b32":
            if modes[1] not in ("idx", "bfly", "up", "down"):
                return None
            if words[-1].lower() not in ("0xffffffff", "-1"):
                raise NotImplementedError(f"{opcode} with the lanes {words[-1]}")
            return (lambda a, b, c, _: shuffle(modes[1], a, b, c)), ["b32"], ["b32"] * 4
        if name == "setp" and len(modes) == 2 and modes[0] in COMPARE and kind in TYPES and kind != "pred":
            return COMPARE[modes[0]], ["pred"], [kind] * 2
        if kind not in TYPES or kind == "pred":
            return None
        ftz = "ftz" in modes[:-1]
        modes = [m for m in modes[:-1] if m != "ftz"]
        if ftz and kind != "f32":
            return None
        if kind == "f32":
            if name in ("add", "sub", "mul") and modes in ([], ["rn"]):
                function, count = ARITHMETIC[name], 2
            elif name == "fma" and modes == ["rn"]:
                function, count = multiply_add, 3
            elif ".".join([name, *modes]) in UNARY:
                function, count = UNARY[".".join([name, *modes])], 1
            elif name in ("mov", "selp") and not modes and not ftz:
                function, count = None, 0
            else:
                return None
            if count:
                if ftz:
                    exact = function
                    function = lambda *x: flush(exact(*map(flush, x)))  # noqa: E731
                return function, ["f32"], ["f32"] * count
        if name == "mul" and modes == ["lo"] and kind[0] in "us":
            return np.multiply, [kind], [kind] * 2
        if modes:
            return None
        if name == "mov":
            return (lambda a: a), [kind], [kind]
        if name == "selp":
            return (lambda a, b, p: np.where(p, a, b)), [kind], [kind, kind, "pred"]
        if name in ("add", "sub") and kind[0] in "us":
            return ARITHMETIC[name], [kind], [kind] * 2
        if name in BITWISE and kind[0] == "b":
            return BITWISE[name], [kind], [kind] * 2
        if (name, kind) in SHIFTS:
            # the count is of the type that is shifted so that numpy keeps it; the sign of a count cannot matter below
            if kind == "s32":
                return (lambda a, b: a >> np.minimum(b, 31).astype(np.int32)), ["s32"], ["s32", "u32"]
            return SHIFTS[name, kind], [kind], [kind, "u32"]
        return None

    def check_order(self):
        """Refuses texts that the compiler's choice of registers may break, and reads of unwritten registers."""
        tied = set(self.outputs) & set(self.inputs)
        known = set(self.start) | set(self.inputs)
        begun = set()  # outputs written so far that may share a register with an input
        for _, sources, written, guard, _ in self.steps:
            read = {register for register, _ in sources} | ({guard} if guard is not None else set())
            if read - known:
                self.refuse("a register is read before it is written")
            if begun and any(register in self.inputs and register not in tied for register in read):
                self.refuse("an input is read after an output whose constraint has no & is written")
            if guard is not None and set(written) - known:
                self.refuse("under a predicate, a register is written that has no value before")
            if set(written) & (set(self.inputs) - tied):
                self.refuse("an input is written")
            known |= set(written)
            begun |= set(written) & (set(self.outputs) - self.early)
        if set(self.outputs) - known:
            self.refuse("an output is never written")

    def run(self, values, size):
        """Takes an array of shape (size,) for each input, and returns one for each output."""
        registers = [None] * len(self.types)
        for register, value in self.start.items():
            registers[register] = special(value, size) if isinstance(value, str) else value
        for register, value in zip(self.inputs, values):
            wanted = TYPES[self.types[register]].itemsize
            if value.itemsize != wanted:
                self.refuse(f"elements of {value.itemsize} bytes for a constraint of {wanted}")
            registers[register] = value.view(f"u{wanted}")
        with np.errstate(all="ignore"):  # a GPU says nothing of an overflow either
            for function, sources, written, guard, sign in self.steps:
                arguments = [registers[i] if view is None else registers[i].view(view) for i, view in sources]
                if function is store_words:
                    stored = np.ones(size, bool) if guard is None else registers[guard] == sign
                    store_words(*np.broadcast_arrays(*arguments), guard=stored)
                    continue
                results = function(*arguments)
                for register, result in zip(written, results if isinstance(results, list) else [results]):
                    if result.dtype != bool:
                        result = result.view(f"u{result.itemsize}")
                    if result.shape[0] != size:
                        result = np.full(size, result)
                    if guard is not None:
                        result = np.where(registers[guard] == sign, result, registers[register])
                    registers[register] = result
        return [registers[register] for register in self.outputs]


@functools.cache
def special(name, size):
    values = np.arange(size, dtype=np.uint32)
    if name == "%laneid":
        values %= 32
    values.flags.writeable = False  # shared by all that ask
    return values


program = functools.cache(Program)


class Results:
    """The result of `create_inline_asm`: the handles of the outputs."""

    def __init__(self, handles):
        self.handles = handles

    def get_result(self, index):
        return self.handles[index]


def create_inline_asm(builder, text, constraints, values, types, is_pure, pack):
    from triton.runtime import interpreter

    if pack != 1:
        raise NotImplementedError(f"inline assembly with pack={pack}")
    shapes = {tuple(ty.shape) for ty in types if ty.is_block()}
    read = program(text, constraints)
    if len(values) != len(read.inputs) or len(types) != len(read.outputs):
        read.refuse(f"{len(types)} results and {len(values)} arguments for the constraints {constraints!r}")
    if shapes:
        ((size, *more),) = shapes
        if more or size % 32:
            read.refuse(f"a shape of {shapes}, which is no number of warps")
        data = [np.ascontiguousarray(value.data) for value in values]
    else:  # scalars: every lane has them
        size = 32
        data = [np.full(size, value.data) for value in values]
    handles = []
    for ty, bits in zip(types, read.run(data, size)):
        wanted = interpreter._get_np_dtype(ty.scalar)
        if wanted.itemsize != bits.itemsize:
            read.refuse(f"a result of {bits.itemsize} bytes as {ty.scalar}")
        if not shapes:
            if (bits != bits[0]).any():
                read.refuse("a scalar that differs from lane to lane (give it a tensor as an argument)")
            bits = bits[:1]
        handles.append(interpreter.TensorHandle(bits.view(wanted), ty.scalar))
    return Results(handles)


def without_checks(elementwise):
    """`tl.inline_asm_elementwise`, but without the broadcast where all arguments have one shape: for an mma, Triton
    takes several times as long to find that out as the product takes."""
    from triton.language import core
    from triton.runtime import interpreter

    block = functools.cache(lambda ty, size: core.block_type(ty, [size]))

    def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack, **context):
        rest = {"dtype": dtype, "is_pure": is_pure, "pack": pack, **context}
        (owner,) = context.values()  # the builder in old versions, later what has it
        builder = getattr(owner, "builder", owner)
        args = list(args)
        ready = bool(args) and all(isinstance(arg, core.tensor) and arg.type.is_block() for arg in args)
        if not (isinstance(builder, interpreter.InterpreterBuilder) and ready):
            return elementwise(asm, constraints, args, **rest)
        size, *more = args[0].handle.data.shape
        if more or any(arg.handle.data.shape != (size,) for arg in args):
            return elementwise(asm, constraints, args, **rest)
        asm, constraints, pack = (getattr(x, "value", x) for x in (asm, constraints, pack))
        several = not isinstance(dtype, core.dtype)
        types = [block(ty, size) for ty in (dtype if several else [dtype])]
        call = builder.create_inline_asm(asm, constraints, [arg.handle for arg in args], types, is_pure, pack)
        results = tuple(core.tensor(call.get_result(i), ty) for i, ty in enumerate(types))
        return results if several else results[0]

    return core.builtin(inline_asm_elementwise)


def install():
    """Gives Triton's interpreter the inline assembly that it lacks. A second call changes nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter.InterpreterBuilder.create_inline_asm is not create_inline_asm:
        interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
        tl.inline_asm_elementwise = tl.core.inline_asm_elementwise = without_checks(tl.core.inline_asm_elementwise)
