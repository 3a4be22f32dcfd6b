"""A second, deliberately simple engine: one thread at a time, plain Python, no checks.

It runs the original bytecode of a kernel with the names of Numba replaced, so it shares nothing
with the emulator: no source transform, no masks, no vectors, its own arithmetic. Each CUDA thread
is an OS thread, and only the one that holds the baton runs.
"""

import itertools
import math
import operator
import threading
from types import CellType, FunctionType, ModuleType, SimpleNamespace

import numpy as np

CASTS = ("int32", "int64", "uint32", "uint64", "float32", "float64")


class Scalar:
    """One number with the result types of Numba: integers widen to 64 bits and wrap."""

    def __init__(self, value):
        self.value = value if isinstance(value, np.generic) else np.array(value)[()]

    def __bool__(self):
        return bool(self.value)

    def __index__(self):
        return int(self.value)

    def __neg__(self):
        return 0 - self if self.value.dtype.kind in "iu" else Scalar(-self.value)

    def __invert__(self):
        return self ^ -1


def wrap(value, unsigned):
    """A Python integer as uint64 or int64, wrapped."""
    value &= 2**64 - 1
    return np.uint64(value) if unsigned else np.int64(value - 2**64 * (value >= 2**63))


def arithmetic(operate, reverse):
    def apply(self, other):
        a, b = self.value, other.value if isinstance(other, Scalar) else np.array(other)[()]
        if reverse:
            a, b = b, a
        if a.dtype.kind in "iu" and b.dtype.kind in "iu" and operate is not operator.truediv:
            shift = operate in (operator.lshift, operator.rshift)
            unsigned = a.dtype.kind == "u" and (shift or b.dtype.kind == "u")
            return Scalar(wrap(operate(int(a), int(b)), unsigned))
        kind = np.float32 if a.dtype == b.dtype == np.float32 else np.float64
        return Scalar(operate(kind(a), kind(b)))

    return apply


def comparison(compare):
    def apply(self, other):
        other = other.value if isinstance(other, Scalar) else other
        if self.value.dtype.kind in "iu" and isinstance(other, (int, np.integer)):
            return compare(int(self.value), int(other))
        return bool(compare(self.value, np.array(other)[()]))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Scalar, f"__{_name}__", arithmetic(getattr(operator, _name), False))
    setattr(Scalar, f"__r{_name}__", arithmetic(getattr(operator, _name), True))
for _name in ("lshift", "rshift", "and", "or", "xor"):
    _operate = getattr(operator, _name, None) or getattr(operator, f"{_name}_")
    setattr(Scalar, f"__{_name}__", arithmetic(_operate, False))
    setattr(Scalar, f"__r{_name}__", arithmetic(_operate, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Scalar, f"__{_name}__", comparison(getattr(operator, _name)))


def cast(value, dtype):
    value = np.array(value.value if isinstance(value, Scalar) else value)
    if value.dtype.kind == "f" and np.dtype(dtype).kind == "u":
        value = value.astype(np.int64)
    return Scalar(value.astype(dtype)[()])


def extreme(choose):
    def apply(*values):
        values = [v if isinstance(v, Scalar) else Scalar(v) for v in values]
        kind = np.result_type(*(v.value.dtype for v in values))
        return cast(choose(values, key=lambda v: v.value), kind)

    return apply


class Memory:
    """A NumPy array that gives out `Scalar` and refuses an index out of bounds."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, index):
        part = self.array[self.checked(index)]
        return Memory(part) if isinstance(part, np.ndarray) else Scalar(part)

    def __setitem__(self, index, value):
        number = isinstance(value, (Scalar, int, float))
        stored = cast(value, self.array.dtype).value if number else value.array
        self.array[self.checked(index)] = stored

    def checked(self, index):
        index = index if isinstance(index, tuple) else (index,)
        for i, extent in zip(index, self.shape, strict=False):
            if not isinstance(i, slice) and not 0 <= int(i) < extent:
                raise IndexError(f"{index} outside {self.shape}")
        bound = {True: lambda s: slice(*(x if x is None else int(x) for x in (s.start, s.stop)))}
        return tuple(bound[True](i) if isinstance(i, slice) else int(i) for i in index)

    def __len__(self):
        return self.shape[0]


class ScalarEngine:
    """``ScalarEngine(kernel)[grid, block](*arrays)`` for one-dimensional grids and blocks."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.cuda = SimpleNamespace(
            syncthreads=lambda: self.meet("block", None) and None,
            shfl_xor_sync=lambda mask, value, lanes: self.shuffle(value, lambda i: i ^ int(lanes)),
            shfl_down_sync=lambda mask, value, delta: self.shuffle(value, lambda i: i + int(delta)),
            shfl_up_sync=lambda mask, value, delta: self.shuffle(value, lambda i: i - int(delta)),
            shfl_sync=lambda mask, value, lane: self.shuffle(value, lambda i: int(lane) & 31),
            shared=SimpleNamespace(array=self.shared_array),
            local=SimpleNamespace(array=lambda shape, dtype: Memory(np.zeros(shape, dtype.dtype))),
            grid=lambda ndim: Scalar(np.int64(self.block * self.block_dim + self.running.rank)),
        )
        self.builtins = {"min": extreme(min), "max": extreme(max)}
        self.casts = {name: self.make_cast(name) for name in CASTS}

    @staticmethod
    def make_cast(name):
        def convert(value):
            return cast(value, name)

        convert.dtype = np.dtype(name)
        return convert

    def __getitem__(self, configuration):
        grid, self.block_dim = configuration
        return lambda *arrays: [self.run_block(b, [Memory(a) for a in arrays]) for b in range(grid)]

    def shared_array(self, shape, dtype):
        call = next(self.running.allocations)
        return self.shared.setdefault(call, Memory(np.zeros(shape, dtype.dtype)))

    def shuffle(self, value, source):
        me, value = self.running.rank % 32, value if isinstance(value, Scalar) else Scalar(value)
        values = self.meet(self.running.rank // 32, value)
        other = self.running.rank - me + source(me)
        return values[other] if 0 <= source(me) < 32 and other in values else value

    def meet(self, place, value):
        """Wait for the others at a barrier; the values that all of them brought."""
        thread = self.running
        thread.place, thread.value = place, value
        self.hub.release()
        thread.baton.acquire()
        return thread.met

    def run_block(self, block, arrays):
        self.block, self.shared, self.hub = block, {}, threading.Semaphore(0)
        function = self.rebind(getattr(self.kernel, "py_func", self.kernel), {})
        threads = [
            SimpleNamespace(rank=rank, place="start", met=None, error=None, value=None)
            for rank in range(self.block_dim)
        ]

        def body(thread):
            thread.baton.acquire()
            try:
                with np.errstate(all="ignore"):
                    function(*arrays)
            except BaseException as error:
                thread.error = error
            thread.place = "done"
            self.hub.release()

        for thread in threads:
            thread.allocations, thread.baton = itertools.count(), threading.Semaphore(0)
            threading.Thread(target=body, args=(thread,), daemon=True).start()
        ready = threads
        while ready:
            for thread in ready:
                self.running = thread
                thread.baton.release()
                self.hub.acquire()
                if thread.error:
                    raise thread.error
            live = [t for t in threads if t.place != "done"]
            groups = {t.place: [o for o in live if o.place == t.place] for t in live}
            ready = [
                t
                for place, group in groups.items()
                for t in group
                if (place == "block" and len(group) == len(live))
                or (place != "block" and all(o in group for o in live if o.rank // 32 == place))
            ]
            for thread in ready:
                thread.met = {o.rank: o.value for o in groups[thread.place]}

    def rebind(self, thing, made):
        """A function, module or type as this engine understands it."""
        if isinstance(thing, ModuleType):
            return {"math": math}.get(thing.__name__, self.cuda)
        if str(thing) in CASTS:
            return self.casts[str(thing)]
        function = getattr(thing, "py_func", thing)
        if not isinstance(function, FunctionType):
            return thing
        if function not in made:
            names = {**function.__globals__, **self.builtins}
            cells = tuple(CellType() for _ in function.__closure__ or ())
            made[function] = FunctionType(
                function.__code__, names, function.__name__, function.__defaults__, cells
            )
            for name in function.__code__.co_names:
                if name in function.__globals__:
                    names[name] = self.rebind(names[name], made)
            for new, old in zip(cells, function.__closure__ or (), strict=True):
                new.cell_contents = self.rebind(old.cell_contents, made)
        return made[function]
