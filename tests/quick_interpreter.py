"""Triton's interpreter without most of the work that it does beside the numbers.

An operation on 32 numbers takes numpy a microsecond and the interpreter fifty: it describes each type anew, asks what
two equal types have in common, and puts its own functions into `triton.language` for every call within a kernel. What
stands here gives the same bits, several times sooner. A Triton that is built in another way stays as it is.
"""

import inspect
import math

import numpy as np

NUMBERS = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
CASTS = {**NUMBERS, "fp16": np.float16, "fp64": np.float64}  # what numpy converts to as Triton does
# Operators: what numpy does, for which types, and whether it tells true from false.
OPERATORS = {
    **{f"__{r}{name}__": (getattr(np, ufunc), NUMBERS, False)
       for name, ufunc in (("add", "add"), ("sub", "subtract"), ("mul", "multiply")) for r in ("", "r")},
    **{f"__{r}truediv__": (np.divide, {"fp32": np.float32}, False) for r in ("", "r")},
    **{f"__{name}__": (getattr(np, ufunc), NUMBERS, True)
       for name, ufunc in (("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal"),
                           ("eq", "equal"), ("ne", "not_equal"))},
    **{f"__{name}__": (getattr(np, f"bitwise_{name}"), {"int1": bool, "int32": np.int32}, False)
       for name in ("and", "or", "xor")},
}  # fmt: skip


def quicken(patch):
    """Replaces functions of the interpreter until `patch`, a `pytest.MonkeyPatch`, is undone."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        change_language_once_a_launch(patch, interpreter)
    if is_known(interpreter, tl):
        call_at_once(patch, interpreter, tl)
        describe_when_asked(patch, tl.core, interpreter.TensorHandle)
        convert_what_differs(patch, interpreter, tl)


def is_known(interpreter, tl):
    """Tells whether the interpreter has what is replaced, in the form in which it is."""
    try:
        Semantic = interpreter.TritonSemantic
        parameters = {
            interpreter._patch_attr: ["obj", "name", "member", "builder", "scope"],
            interpreter._patch_builtin: ["pkg", "builder", "scope"],
            interpreter._get_np_dtype: ["tt_dtype"],
            interpreter.TensorHandle.__init__: ["self", "data", "dtype", "attr"],
            tl.tensor.__init__: ["self", "handle", "type"],
            tl.core.tuple.__init__: ["self", "args", "type"],
            tl.core._unwrap_if_constexpr: ["o"],
            tl.block_type.with_element_ty: ["self", "scalar_ty"],
            Semantic.broadcast_impl_value: ["self", "lhs", "rhs"],
            Semantic.cast: ["self", "input", "dst_ty", "fp_downcast_rounding"],
            Semantic.scalar_constant: ["self", "value", "dtype"],
        }
        shape = tl.block_type(tl.float32, [1, 2]).shape
        return (
            all(list(inspect.signature(function).parameters) == names for function, names in parameters.items())
            and hasattr(Semantic, "binary_op_type_checking_impl")
            and isinstance(shape, tl.core.tuple)
            and shape.values == [1, 2]
        )
    except AttributeError:
        return False


def change_language_once_a_launch(patch, interpreter):
    """The interpreter's functions are put into `triton.language` once for each module whose functions a launch runs."""
    put, launch, modules = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def put_once(fn):
        if id(fn.__globals__) not in modules:
            modules.add(id(fn.__globals__))
            return put(fn)  # what undoes it after the launch, of which only the first in a launch is asked for

    def launch_anew(self, *args, **kwargs):
        modules.clear()
        return launch(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", put_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    # Checks that no sum of integers overflows: sizes here are small, and a GPU makes none. The options are frozen.
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    if hasattr(options, "sanitize_overflow"):
        object.__setattr__(options, "sanitize_overflow", False)


def call_at_once(patch, interpreter, tl):
    """What is put into `triton.language` calls what computes, not first what looks whether `_semantic` is given. It is
    made once, not for each launch."""
    made = {}

    def put_functions(pkg, builder, scope):
        if pkg not in made:
            made[pkg] = {name: (None, None) for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)}
        for name, (member, call) in made[pkg].items():
            now = getattr(pkg, name)
            if now is not member and tl.core.is_builtin(now):  # a test may have put another one there
                member, call = made[pkg][name] = now, make(pkg, name, now)
            if now is member:  # and not what a launch that is under way has put there
                scope.set_attr(pkg, name, call)

    def put_function(obj, name, member, builder, scope):
        scope.set_attr(obj, name, make(obj, name, member))

    def make(obj, name, member):
        inner = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        if obj is tl.tensor and name == "__add__":
            call = go_on_at_once(interpreter, tl, call)
        if obj is tl.tensor and name in OPERATORS:
            call = operate_at_once(interpreter, tl, name, call)
        return call

    patch.setattr(interpreter, "_patch_attr", put_function)
    patch.setattr(interpreter, "_patch_builtin", put_functions)


def operate_at_once(interpreter, tl, name, call):
    """`call`, the operator `name`, but numpy's from here where both operands are of one type, or the other is a number,
    and no shape has to grow but a scalar's."""
    operate, types, tells = OPERATORS[name]
    turned, tensor, Handle = name.startswith("__r"), tl.tensor, interpreter.TensorHandle

    def call_or_operate(self, other, **kwargs):
        dtype, block = self.dtype, self.type
        np_type = types.get(dtype.name)
        if np_type is None:
            return call(self, other, **kwargs)
        number = other.value if type(other) is tl.constexpr else other
        kind, left = type(number), self.handle.data
        if kind is tensor:
            right = other.handle.data
            if other.dtype.name != dtype.name or left.dtype != right.dtype:
                return call(self, other, **kwargs)
            if block is dtype:  # a scalar, which is its own scalar type
                block = other.type
            elif other.type is not other.dtype and left.shape != right.shape:
                return call(self, other, **kwargs)
        elif kind is bool or kind is float:
            if np_type is not (bool if kind is bool else np.float32):
                return call(self, other, **kwargs)
            right = np_type(number or 0)  # a zero has no sign, as in Triton
        elif kind is int and np_type is not bool and abs(number) < 2**31:
            right = np_type(number)
        else:
            return call(self, other, **kwargs)
        data = operate(right, left) if turned else operate(left, right)
        return tensor(Handle(data, dtype), block.with_element_ty(tl.int1) if tells else block)

    return call_or_operate


def go_on_at_once(interpreter, tl, call):
    """`call`, the addition, but numpy's from here for a pointer and what is added to it, as above."""

    def call_or_go_on(self, other, **kwargs):
        dtype, block = self.dtype, self.type
        width = dtype.element_ty.primitive_bitwidth // 8 if dtype.is_ptr() else 0
        if width and type(other) is tl.tensor and other.dtype.name in ("int32", "int64"):
            offset = other.handle.data
            if block is dtype:
                block = other.type.with_element_ty(dtype) if other.type.is_block() else dtype
            elif other.type is not other.dtype and self.handle.data.shape != offset.shape:
                return call(self, other, **kwargs)
            offset = width * offset.astype(np.uint64)
        elif width and type(other) is int and abs(other) < 2**31:
            offset = np.uint64(width * other % 2**64)
        else:
            return call(self, other, **kwargs)
        data = self.handle.data + offset
        return tl.tensor(interpreter.TensorHandle(data, dtype), block)

    return call_or_go_on


def describe_when_asked(patch, core, TensorHandle):
    """A tensor makes its shape, and a tuple its type, when they are read, which is seldom. Numbers are not measured
    again at each step."""

    def make_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, attr or {}

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def lengths(tensor):
        return tensor.type.shape if tensor.type.is_block() else ()

    def make_tuple(self, args, type=None):
        self.values, self.given = [*args], type

    def type_of_tuple(self):
        if self.given is None:
            return core._type_for_tuple_values(self.values)
        return self.given if isinstance(self.given, core.tuple_type) else core.tuple_type(self.given)

    def set_type(self, type):
        self.given = type

    shape = property(lambda self: core.tuple([core.constexpr(length) for length in lengths(self)]))
    numel = property(lambda self: core.constexpr(math.prod(lengths(self))))
    patch.setattr(TensorHandle, "__init__", make_handle)
    patch.setattr(core.tensor, "__init__", make_tensor)
    patch.setattr(core.tensor, "shape", shape, raising=False)
    patch.setattr(core.tensor, "numel", numel, raising=False)
    patch.setattr(core.tuple, "__init__", make_tuple)
    patch.setattr(core.tuple, "type", property(type_of_tuple, set_type), raising=False)


def convert_what_differs(patch, interpreter, tl):
    """Operands of one type and shape are left as they are, and a type that was made before is found again."""
    Semantic, block_type = interpreter.TritonSemantic, tl.block_type
    check, broadcast, cast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value, Semantic.cast
    np_dtype, with_element = interpreter._get_np_dtype, block_type.with_element_ty
    np_dtypes, blocks, whole = {}, {}, ("int32", "int64")

    def check_different(self, lhs, rhs, *args, **kwargs):
        if isinstance(lhs, tl.tensor):
            name = lhs.dtype.name
            if isinstance(rhs, tl.tensor):
                if name == rhs.dtype.name and name in ("fp32", "int1", *whole):  # 16 bits are divided in 32
                    return broadcast_different(self, lhs, rhs)
            elif type(rhs) is int and name in whole and abs(rhs) < 2**31 or type(rhs) is float and name == "fp32":
                return broadcast_different(self, lhs, self.scalar_constant(rhs, lhs.dtype))
        return check(self, lhs, rhs, *args, **kwargs)

    def cast_different(self, input, dst_ty, fp_downcast_rounding=None):
        given, wanted = input.dtype.name, dst_ty.scalar
        if fp_downcast_rounding is None and (given in CASTS or given == "int1") and wanted.name in CASTS:
            if given == wanted.name:
                return input
            data = input.handle.data.astype(CASTS[wanted.name])
            block = known_block(input.type, wanted) if input.type.is_block() else wanted
            return tl.tensor(interpreter.TensorHandle(data, wanted), block)
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def broadcast_different(self, lhs, rhs):
        left, right = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
        if left is None and right is not None:
            lhs = fill(rhs.type, lhs)
        elif right is None and left is not None:
            rhs = fill(lhs.type, rhs)
        elif left is not None and left.values != right.values:
            return broadcast(self, lhs, rhs)
        return lhs, rhs

    def fill(block, value):
        data = np.full(block.shape.values, value.handle.data, known_np_dtype(value.dtype))
        return tl.tensor(interpreter.TensorHandle(data, value.dtype), known_block(block, value.dtype))

    def known_np_dtype(tt_dtype):
        name = tt_dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(tt_dtype)
        return np_dtypes[name]

    def known_block(self, scalar_ty):
        key = scalar_ty.name, getattr(scalar_ty, "address_space", None), *self.shape.values
        if key not in blocks:
            blocks[key] = with_element(self, scalar_ty)
        return blocks[key]

    unwrap, equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    bare = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}
    patch.setattr(tl.core, "_unwrap_if_constexpr", lambda o: o if type(o) in bare else unwrap(o))
    patch.setattr(tl.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patch.setattr(Semantic, "binary_op_type_checking_impl", check_different)
    patch.setattr(Semantic, "broadcast_impl_value", broadcast_different)
    patch.setattr(Semantic, "cast", cast_different)
    patch.setattr(interpreter, "_get_np_dtype", known_np_dtype)
    patch.setattr(block_type, "with_element_ty", known_block)
    patch.setattr(block_type, "to_ir", lambda self, builder: self)  # as the interpreter's builder would make it
