"""A toy score option and a toy kind of mask, as edits by the recipes of CONTRIBUTING.md.

`shift` is added to every score, after the softcap: lse grows by it, o and the gradients stay.
`Mask.stripes(step)` shows the pairs with (i + j) % step == 0.
"""

from __future__ import annotations

from tests.support.edits import Edit


def _after(file: str, line: str, *new: str, count: int = 1) -> Edit:
    """Adds new lines after a line."""
    return Edit(file, f"{line}\n", "".join(f"{one}\n" for one in (line, *new)), count)


_FIELDS = "csrc/common/fields.h"
_OPTIONS = "transformer_kernels/scores/options.py"
_OPERATORS = "transformer_kernels/functional"
_TRITON = "transformer_kernels/backends/triton/kernels"
_CPU_SCORES = "csrc/cpu/attention/scores.h"
_CUDA_SCORES = "csrc/cuda/common/scores.cuh"

SHIFT = (
    _after(_OPTIONS, '    """0: no softcap."""', "    shift: float = 0.0"),
    _after(_OPTIONS, "    softcap: float | None", "    shift: float"),
    _after(
        _OPTIONS,
        '        softcap=_softcap(arguments.get("softcap")),',
        '        shift=check_number("shift", arguments.get("shift", 0.0)),',
    ),
    *(
        _after(
            f"{_OPERATORS}/{operator}.py",
            "    softcap: float | None = None,",
            "    shift: float = 0.0,",
        )
        for operator in ("attention", "varlen", "decode")
    ),
    *(
        Edit(
            f"{_OPERATORS}/{operator}.py",
            '"softcap": softcap,',
            '"softcap": softcap, "shift": shift,',
        )
        for operator in ("attention", "varlen", "decode")
    ),
    *(
        Edit(
            f"{_OPERATORS}/{operator}.py",
            "bias is None and relative",
            "not shift and bias is None and relative",
        )
        for operator in ("attention", "decode")
    ),
    _after(
        "transformer_kernels/distributed/arguments.py",
        "    softcap: float | None = None",
        "    shift: float = 0.0",
    ),
    Edit(
        "transformer_kernels/backends/reference.py",
        "    s = _add_bias(problem, s)\n",
        "    s = _add_bias(problem, s) + scores.shift\n",
    ),
    _after(f"{_TRITON}/scores.py", "    softcap: float | None", "    shift: float | None"),
    Edit(
        f"{_TRITON}/scores.py",
        "not options.softcap and",
        "not options.softcap and not options.shift and",
    ),
    _after(
        f"{_TRITON}/scores.py",
        "        softcap=options.softcap or None,",
        "        shift=options.shift or None,",
    ),
    _after(
        f"{_TRITON}/scores.py",
        "    s = scaled(products, scores)",
        "    if scores.shift is not None:",
        "        s += scores.shift",
    ),
    Edit(
        _FIELDS,
        'softcap, "dense varlen cache")',
        'softcap, "dense varlen cache") NUMBER(double, "float", shift, "dense varlen cache")',
    ),
    Edit(_CPU_SCORES, "p.score.softcap == 0 &&", "p.score.softcap == 0 && p.score.shift == 0 &&"),
    _after(
        _CPU_SCORES,
        "    if (p.score.alibi_slopes) add_alibi<Real, kQueries>(p, block, s);",
        "    const Real shift = static_cast<Real>(p.score.shift);",
        "    for_each_vector(s, count, [&](Vec<Real> x, int64_t) { return x + shift; });",
    ),
    Edit(_CUDA_SCORES, "return s.softcap != 0 ||", "return s.softcap != 0 || s.shift != 0 ||"),
    _after(_CUDA_SCORES, "  float softcap;", "  float shift;"),
    _after(
        _CUDA_SCORES,
        "  x.softcap = static_cast<float>(given.softcap);",
        "  x.shift = static_cast<float>(given.shift);",
    ),
    _after(_CUDA_SCORES, "  if (x.bias) s.value += bias_at(x, i, j);", "  s.value += x.shift;"),
)

_MASKS = "transformer_kernels/masks"
_MASK_OPTIONS = "csrc/common/options.cpp"
_ELEMENT_MASK = "csrc/common/mask.h"

_CONSTRAINT = '''\
@dataclass(frozen=True)
class Stripes:
    """Visible: (i + j) % step == 0."""

    step: int

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def visible(self, M: int, N: int, device: torch.device) -> Tensor:
        i, j = torch.arange(M, device=device)[:, None], torch.arange(N, device=device)
        return ((i + j) % self.step == 0)[None, None]

    def part(self, rows: range, columns: range, M: int, N: int) -> Stripes:
        if (rows.start + columns.start) % self.step:
            raise ValueError(f"a part of stripes must start at a multiple of {self.step}")
        return self

    def extent(self) -> tuple[int, int]:
        return 1, 1

    def check(self, B: int, H: int, M: int, N: int) -> None:
        """Accepts all sizes."""


'''
_CONSTRUCTOR = '''\
    @staticmethod
    def stripes(step: int) -> Mask:
        """Stripes: (i + j) % step == 0 is visible."""
        check_int("step", step, 1)
        return Mask((Stripes(step),))

'''

STRIPES = (
    Edit(f"{_MASKS}/constraints.py", "Constraint = Window", f"{_CONSTRAINT}Constraint = Window"),
    Edit(f"{_MASKS}/constraints.py", "Dense | BlockSparse\n", "Dense | BlockSparse | Stripes\n"),
    _after(f"{_MASKS}/mask.py", "    Segments,", "    Stripes,"),
    Edit(f"{_MASKS}/mask.py", "    def materialize(\n", f"{_CONSTRUCTOR}    def materialize(\n"),
    _after(f"{_MASKS}/resolved.py", "    Segments,", "    Stripes,"),
    _after(
        f"{_MASKS}/resolved.py",
        '    block_size: Annotated[int, "", "dense"] = 0',
        '    stripe_step: Annotated[int, "", "dense"] = 0',
    ),
    Edit(
        f"{_MASKS}/resolved.py",
        "        return not (self.q_low is None",
        "        return self.stripe_step > 0 or not (self.q_low is None",
    ),
    _after(
        f"{_MASKS}/resolved.py",
        "            yield BlockSparse(self.blocks, self.block_size)",
        "        if self.stripe_step > 0:",
        "            yield Stripes(self.stripe_step)",
    ),
    _after(
        f"{_MASKS}/resolved.py",
        "            visible = visible & blocks.index_select(2, columns // self.block_size)",
        "        if self.stripe_step > 0:",
        "            visible = visible & ((rows[:, None] + columns) % self.stripe_step == 0)",
    ),
    Edit(f"{_MASKS}/resolved.py", "    size = 0\n", "    size = step = 0\n"),
    _after(
        f"{_MASKS}/resolved.py",
        "                blocks, size = _merge_blocks(blocks, size, one, M, N)",
        "            case Stripes():",
        "                step = math.lcm(step or 1, one.step)",
    ),
    Edit(f"{_MASKS}/resolved.py", "dense, blocks, size,\n", "dense, blocks, size, step,\n"),
    _after(f"{_TRITON}/masks.py", "    block_size: int", "    stripe_step: int | None"),
    _after(
        f"{_TRITON}/masks.py",
        "        block_size=mask.block_size,",
        "        stripe_step=mask.stripe_step or None,",
    ),
    _after(
        f"{_TRITON}/masks.py",
        "    inside = is_visible",
        "    if mask.stripe_step is not None:",
        "        is_visible = is_visible & ((i + j) % mask.stripe_step == 0)",
    ),
    Edit(
        _FIELDS,
        '  NUMBER(int64_t, "SymInt", block_size, "dense")\n',
        '  NUMBER(int64_t, "SymInt", block_size, "dense")                     \\\n'
        '  NUMBER(int64_t, "SymInt", stripe_step, "dense")\n',
    ),
    _after("csrc/common/params.h", "  int64_t block_size = 0;", "  int64_t stripe_step = 0;"),
    _after(
        _MASK_OPTIONS,
        "  mask.key_end = data_of<int64_t>(options.key_end);",
        "  mask.stripe_step = options.stripe_step;",
    ),
    Edit(
        _MASK_OPTIONS,
        "  return options.q_low ||",
        "  return options.stripe_step > 0 || options.q_low ||",
    ),
    Edit(_ELEMENT_MASK, "{ return mask.dense ||", "{ return mask.stripe_step || mask.dense ||"),
    _after(
        _ELEMENT_MASK,
        "  uint64_t bits = bit_range(0, columns);",
        "  for (int64_t c = 0; mask.stripe_step > 0 && c < columns; ++c) {",
        "    if ((i + j0 + c) % mask.stripe_step) bits &= ~(uint64_t{1} << c);",
        "  }",
    ),
    Edit(_ELEMENT_MASK, "  if (mask.dense || (", "  if (mask.stripe_step || mask.dense || ("),
    _after(
        _ELEMENT_MASK,
        "TK_INLINE bool element_visible(const MaskParams& mask, int64_t b, int64_t h, int64_t i, "
        "int64_t j) {",
        "  if (mask.stripe_step > 0 && (i + j) % mask.stripe_step) return false;",
    ),
)
