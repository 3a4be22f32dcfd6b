"""What every special instruction is: its PTX, its operands, its sizes.

A description is plain data. `ptx` makes the GPU's form of it; `emulator.tensor` and
`emulator.hopper` do with NumPy what it says. Source: PTX ISA 9.0, "Instruction set".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .layouts import Positions, a_fragment, b_fragment, c_fragment
from .wgmma import Wgmma as Wgmma

# Operands


@dataclass(frozen=True)
class Scalar:
    """A number: one argument."""

    dtype: str


@dataclass(frozen=True)
class Literal:
    """An integer that is known when the kernel is compiled: one argument."""


@dataclass(frozen=True)
class Registers:
    """``count`` elements of a local array: two arguments, the array and the first element.

    Attributes
    ----------
    access : {"read", "write", "update"}
    whole : bool
        The elements are the first of the array; there is no second argument.
    """

    count: int
    dtype: str
    access: str
    whole: bool = False


@dataclass(frozen=True)
class Address:
    """A place in an array: two arguments, the array and an element offset.

    Attributes
    ----------
    space : {"shared", "global"}
    dtype : str
        What the array must hold; "" for anything.
    whole : bool
        The place is where the array begins; there is no second argument.
    """

    space: str
    dtype: str = ""
    whole: bool = False


Operand = Scalar | Literal | Registers | Address


@dataclass(frozen=True)
class Ptx:
    """A statement, in which ``{name}`` stands for an operand and ``{result}`` for its value.

    Attributes
    ----------
    text : str
    operands : mapping of str to Operand
        In the order of the arguments.
    result : str or None
        The dtype of the value.
    pure : bool
        Whether nothing but registers is touched, so that the compiler may move it.
    """

    text: str
    operands: Mapping[str, Operand] = field(default_factory=dict)
    result: str | None = None
    pure: bool = False


# Arrays


@dataclass(frozen=True)
class ElementOffset:
    """Where an element of a four-dimensional array is, as the element offset that others take."""

    @property
    def ptx(self) -> Ptx:
        indices = dict.fromkeys(("batch", "head", "row", "column"), Scalar("int64"))
        return Ptx("", {"array": Address("global", whole=True), **indices}, "int64")


@dataclass(frozen=True)
class LoadsByFour:
    """Whether four neighbours of the last axis, from a multiple of four on, are one vector load.

    They are if that axis is contiguous, and its rows begin at multiples of four elements, none of
    them before the first.
    """

    @property
    def ptx(self) -> Ptx:
        return Ptx("", {"array": Address("global", whole=True)}, "boolean")


# Lane by lane


@dataclass(frozen=True)
class Elementwise:
    """A function of numbers; ``twin`` computes the same with NumPy.

    ``text`` is empty where the function is made of ordinary instructions.
    """

    name: str
    twin: Callable[..., object]
    text: str = ""
    arguments: Mapping[str, str] = field(default_factory=lambda: {"x": "float32"})
    result: str = "float32"

    @property
    def ptx(self) -> Ptx:
        operands = {name: Scalar(dtype) for name, dtype in self.arguments.items()}
        return Ptx(self.text, operands, self.result, pure=True)


@dataclass(frozen=True)
class VectorLoad:
    """Loads ``words`` registers of 4 bytes from global or shared memory at once."""

    words: int


@dataclass(frozen=True)
class VectorStore:
    """Stores ``words`` registers of 4 bytes to global or shared memory at once."""

    words: int


@dataclass(frozen=True)
class RegisterProduct:
    """A product of two small matrices in a thread's registers, one multiply-add after the other.

    acc[c, r] += sum over x < ``depth`` of a[r, x] * b[c, x]. It is no instruction, but written as
    loops it depends on the compiler's mood whether they are unrolled; if they are not, arrays that
    they index leave the registers for memory.

    Attributes
    ----------
    depth_first : bool
        a and b are stored as a[x, r] and b[x, c], else as a[r, x] and b[c, x].
    """

    rows: int
    columns: int
    depth: int
    depth_first: bool

    @property
    def ptx(self) -> Ptx:
        sizes = {"acc": (self.rows * self.columns, "update")}
        sizes |= {"a": (self.rows * self.depth, "read"), "b": (self.columns * self.depth, "read")}
        operands = {
            name: Registers(count, "float32", access, whole=True)
            for name, (count, access) in sizes.items()
        }
        return Ptx("", operands)

    def place(self, line: int, x: int, lines: int) -> int:
        """Where a[line, x] or b[line, x] is stored."""
        return x * lines + line if self.depth_first else line * self.depth + x


# Matrices of a warp


@dataclass(frozen=True)
class LdMatrix:
    """Loads ``count`` 8 x 8 matrices of 16 bits; lane 8 i + r gives the address of row r of i."""

    count: int
    trans: bool = False

    @property
    def ptx(self) -> Ptx:
        return Ptx(
            f"ldmatrix.sync.aligned.m8n8.x{self.count}{'.trans' * self.trans}.shared.b16 "
            "{dst}, [{src}];",
            {"dst": Registers(self.count, "uint32", "write"), "src": Address("shared")},
        )


@dataclass(frozen=True)
class StMatrix:
    """Stores ``count`` 8 x 8 matrices of 16 bits; the counterpart of `LdMatrix`."""

    count: int
    trans: bool = False

    @property
    def ptx(self) -> Ptx:
        return Ptx(
            f"stmatrix.sync.aligned.m8n8.x{self.count}{'.trans' * self.trans}.shared.b16 "
            "[{dst}], {src};",
            {"dst": Address("shared"), "src": Registers(self.count, "uint32", "read")},
        )


@dataclass(frozen=True)
class Mma:
    """d += a b for a warp: d is 16 x 8 in float32, a is 16 x k, b is k x 8."""

    k: int
    dtype: str

    @property
    def per_register(self) -> int:
        """Elements of ``a`` or ``b`` in a register."""
        return 1 if self.dtype == "tf32" else 2

    @property
    def a_layout(self) -> Positions:
        return a_fragment(self.per_register)

    @property
    def b_layout(self) -> Positions:
        return b_fragment(self.per_register)

    @property
    def d_layout(self) -> Positions:
        return c_fragment()

    @property
    def multiply_adds(self) -> int:
        return 16 * 8 * self.k

    @property
    def ptx(self) -> Ptx:
        return Ptx(
            f"mma.sync.aligned.m16n8k{self.k}.row.col.f32.{self.dtype}.{self.dtype}.f32 "
            "{d}, {a}, {b}, {d};",
            {
                "d": Registers(4, "float32", "update"),
                "a": Registers(4, "uint32", "read"),
                "b": Registers(2, "uint32", "read"),
            },
            pure=True,
        )


# Copies from global to shared memory that a thread waits for (sm_80)


@dataclass(frozen=True)
class CpAsync:
    """Copies ``num_bytes``, or writes zeros and reads nothing where ``keep`` is false."""

    num_bytes: int

    @property
    def ptx(self) -> Ptx:
        cache = "cg" if self.num_bytes == 16 else "ca"
        return Ptx(
            "{{ .reg .pred p; .reg .b32 n; setp.ne.b32 p, {keep}, 0; "
            f"selp.b32 n, {self.num_bytes}, 0, p; "
            f"cp.async.{cache}.shared.global [{{dst}}], [{{src}}], {self.num_bytes}, n; }}}}",
            {"dst": Address("shared"), "src": Address("global"), "keep": Scalar("boolean")},
        )


@dataclass(frozen=True)
class CpAsyncCommit:
    """Makes a group of the thread's copies since its last commit."""

    ptx = Ptx("cp.async.commit_group;")


@dataclass(frozen=True)
class CpAsyncWait:
    """Waits until at most ``n`` of the thread's groups are on their way."""

    ptx = Ptx("cp.async.wait_group {n};", {"n": Literal()})


# Barriers in shared memory, and fences (sm_90)

_BARRIER = Address("shared", "uint64")


@dataclass(frozen=True)
class MbarrierInit:
    """A barrier whose phase ends after ``count`` arrivals."""

    ptx = Ptx(
        "mbarrier.init.shared::cta.b64 [{barrier}], {count};",
        {"barrier": _BARRIER, "count": Scalar("uint32")},
    )


@dataclass(frozen=True)
class MbarrierArrive:
    """One arrival."""

    ptx = Ptx("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", {"barrier": _BARRIER})


@dataclass(frozen=True)
class MbarrierArriveExpectTx:
    """One arrival; the phase then also waits for ``num_bytes`` of copies."""

    ptx = Ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {num_bytes};",
        {"barrier": _BARRIER, "num_bytes": Scalar("uint32")},
    )


@dataclass(frozen=True)
class MbarrierWait:
    """Waits for the end of the phase of this parity; of a fresh barrier, phase 1 has ended."""

    ptx = Ptx(
        "{{ .reg .pred p; WAIT_${{:uid}}: "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {parity}; "
        "@!p bra WAIT_${{:uid}}; }}",
        {"barrier": _BARRIER, "parity": Scalar("uint32")},
    )


@dataclass(frozen=True)
class FenceMbarrierInit:
    """Makes fresh barriers visible to asynchronous copies."""

    ptx = Ptx("fence.mbarrier_init.release.cluster;")


@dataclass(frozen=True)
class FenceProxyAsync:
    """Makes ordinary stores to shared memory visible to TMA and wgmma."""

    ptx = Ptx("fence.proxy.async.shared::cta;")


# Tensor copies (sm_90)

_TENSOR_MAP = Address("global", "uint64", whole=True)


def _coordinates(ndim: int) -> tuple[str, Mapping[str, Operand]]:
    names = [f"c{axis}" for axis in range(ndim)]
    return ", ".join(f"{{{name}}}" for name in names), dict.fromkeys(names, Scalar("int32"))


@dataclass(frozen=True)
class TmaLoad:
    """Copies a box to shared memory; its bytes count at a barrier.

    Coordinates are those of the box's first element, the fastest axis first.
    """

    ndim: int

    @property
    def ptx(self) -> Ptx:
        names, coordinates = _coordinates(self.ndim)
        return Ptx(
            f"cp.async.bulk.tensor.{self.ndim}d.shared::cluster.global"
            f".mbarrier::complete_tx::bytes [{{dst}}], [{{tensor_map}}, {{{{{names}}}}}], "
            "[{barrier}];",
            {
                "dst": Address("shared"),
                "tensor_map": _TENSOR_MAP,
                **coordinates,
                "barrier": _BARRIER,
            },
        )


@dataclass(frozen=True)
class TmaStore:
    """Copies a box from shared memory, or with ``add`` adds it to what is there."""

    ndim: int
    add: bool = False

    @property
    def ptx(self) -> Ptx:
        names, coordinates = _coordinates(self.ndim)
        name = "cp.reduce.async.bulk" if self.add else "cp.async.bulk"
        return Ptx(
            f"{name}.tensor.{self.ndim}d.global.shared::cta{'.add.tile' * self.add}.bulk_group "
            f"[{{tensor_map}}, {{{{{names}}}}}], [{{src}}];",
            {"tensor_map": _TENSOR_MAP, **coordinates, "src": Address("shared")},
        )


@dataclass(frozen=True)
class BulkCommit:
    """Makes a group of the thread's tensor stores since its last commit."""

    ptx = Ptx("cp.async.bulk.commit_group;")


@dataclass(frozen=True)
class BulkWait:
    """Waits until at most ``n`` groups are unfinished, or with ``read`` still read their source."""

    read: bool = False

    @property
    def ptx(self) -> Ptx:
        return Ptx(
            f"cp.async.bulk.wait_group{'.read' * self.read} {{n}};",
            {"n": Literal()},
        )


@dataclass(frozen=True)
class PrefetchTensorMap:
    """Fetches a tensor map before its first use."""

    ptx = Ptx("prefetch.tensormap [{tensor_map}];", {"tensor_map": _TENSOR_MAP})


# Matrices of a warpgroup (sm_90a); `Wgmma` has a file of its own


@dataclass(frozen=True)
class WgmmaFence:
    """Orders accesses of accumulators and A registers before the next `Wgmma`."""

    ptx = Ptx("wgmma.fence.sync.aligned;")


@dataclass(frozen=True)
class WgmmaCommit:
    """Makes a group of the warpgroup's products since its last commit."""

    ptx = Ptx("wgmma.commit_group.sync.aligned;")


@dataclass(frozen=True)
class WgmmaWait:
    """Waits until at most ``n`` groups are unfinished."""

    ptx = Ptx("wgmma.wait_group.sync.aligned {n};", {"n": Literal()})


@dataclass(frozen=True)
class Touch:
    """No instruction: the compiler has to have these registers ready here, and not before."""

    count: int
    dtype: str = "float32"

    @property
    def ptx(self) -> Ptx:
        return Ptx("", {"registers": Registers(self.count, self.dtype, "update", whole=True)})


# Warps of a block with different roles


@dataclass(frozen=True)
class NamedBarrierSync:
    """Waits at barrier ``barrier`` (0 is syncthreads') for ``threads`` to sync or arrive there."""

    ptx = Ptx(
        "bar.sync {barrier}, {threads};",
        {"barrier": Scalar("uint32"), "threads": Scalar("uint32")},
    )


@dataclass(frozen=True)
class NamedBarrierArrive:
    """Arrives at a named barrier without waiting."""

    ptx = Ptx(
        "bar.arrive {barrier}, {threads};",
        {"barrier": Scalar("uint32"), "threads": Scalar("uint32")},
    )


@dataclass(frozen=True)
class SetMaxNReg:
    """Takes ("inc") or gives up ("dec") registers of a warpgroup, to have ``n`` a thread."""

    direction: str

    @property
    def ptx(self) -> Ptx:
        return Ptx(
            f"setmaxnreg.{self.direction}.sync.aligned.u32 {{n}};",
            {"n": Literal()},
        )
