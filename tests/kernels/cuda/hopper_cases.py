"""Additional cases for the Hopper kernels.

Persistent CTAs with row blocks of 128 to 192 queries: several tiles per CTA, and several key blocks
of 64 or 128 keys per tile.
"""

from __future__ import annotations

from tests.support.cases import Case
from tests.support.masks import CAUSAL, CAUSAL_END, Dense, KeyRange, Segments, Window, padding
from tests.support.varlen_cases import VarlenCase


def _lengths(N: int) -> KeyRange:
    """Key lengths that end within a key block, in each of the first three."""
    return KeyRange(end=(70, 1, N - 5, 200))


_RANGE = KeyRange(start=(30, 150), end=(290, 327))
"""A key range of 330 keys that begins and ends within key blocks."""
_DOCUMENTS = Segments(length=90, without=(5, 40), gap=(100, 117))

HOPPER_CASES = (
    Case(name="many-tiles", B=1, H_q=15, H_kv=5, M=70, N=140),
    Case(name="many-short-tiles", B=1, H_q=22, H_kv=11, M=5, N=60),
    Case(name="many-tiles-128", B=1, H_q=16, H_kv=4, M=70, N=260, D=128, D_v=128,
         mask=CAUSAL_END),
    Case(name="persistent", B=1, H_q=9, H_kv=3, M=200, N=330, D=64, D_v=64, dlse=True),
    Case(name="persistent-causal", B=1, H_q=6, H_kv=6, M=400, N=400, D=64, D_v=64, mask=CAUSAL),
    Case(name="persistent-128", B=1, H_q=4, H_kv=2, M=300, N=300, D=128, D_v=128,
         mask=CAUSAL_END),
    Case(name="persistent-192", B=2, H_q=2, H_kv=2, M=270, N=280, D=192, D_v=128,
         mask=Window(100, 3)),
    Case(name="persistent-256", B=2, H_q=2, H_kv=2, M=270, N=210, D=256, D_v=256, mask=CAUSAL),
    Case(name="persistent-padding", B=4, H_q=3, H_kv=3, M=200, N=330, D=16, D_v=16,
         mask=padding(330), dlse=True),
    Case(name="rows-of-64", B=1, H_q=1, H_kv=1, M=192, N=128, D=64, D_v=64),
    Case(name="wide-keys-192", M=71, N=200, D=192, D_v=104),
    Case(name="wide-keys-256", M=71, N=131, D=200, D_v=136),
    Case(name="queries-192", B=1, H_q=2, H_kv=1, M=140, N=190, D=192, D_v=128, dlse=True),
    Case(name="queries-256", B=1, H_q=2, H_kv=1, M=140, N=70, D=256, D_v=256, dlse=True),
    Case(name="shared-keys", B=1, H_q=8, H_kv=1, M=200, N=130, D=64, D_v=64, mask=CAUSAL_END),
    Case(name="shared-keys-128", B=1, H_q=6, H_kv=1, M=150, N=150, D=128, D_v=128, dlse=True,
         mask=CAUSAL),
    Case(name="shared-keys-192", B=1, H_q=4, H_kv=1, M=140, N=150, D=192, D_v=104,
         dropout_p=0.1),
    Case(name="shared-keys-256", B=2, H_q=6, H_kv=1, M=140, N=70, D=256, D_v=256,
         mask=KeyRange(start=(3, 40), end=(60, 70)), hidden="nan"),
    Case(name="wide-values-128", M=71, N=131, D=40, D_v=120),
    Case(name="wide-values-256", M=71, N=131, D=64, D_v=256),
    Case(name="lengths-nan", B=4, M=67, N=330, D=24, D_v=40, mask=_lengths(330), hidden="nan"),
    Case(name="lengths-nan-256", B=2, M=67, N=200, D=256, D_v=256, mask=_lengths(200),
         hidden="nan"),
    Case(name="range-nan", M=200, N=330, mask=(_RANGE, CAUSAL_END), hidden="nan"),
    Case(name="documents-nan", M=200, N=270, D=64, D_v=64, mask=_DOCUMENTS, hidden="nan"),
    Case(name="documents-inf", M=270, N=270, D=128, D_v=128, mask=(_DOCUMENTS, CAUSAL),
         hidden="-inf"),
    Case(name="wide-everything", H_q=4, H_kv=2, M=150, N=200, D=192, D_v=128,
         mask=(_lengths(200), Dense("1hmn")), softcap=2.0, dlse=True),
    Case(name="dropout-queries", B=1, H_q=1, H_kv=1, M=600, N=130, D=16, D_v=16, dropout_p=0.1),
    Case(name="dropout-128", B=1, H_q=6, H_kv=2, M=200, N=270, D=128, D_v=128, dropout_p=0.2,
         mask=CAUSAL_END),
    Case(name="dropout-192", H_q=2, H_kv=2, M=140, N=150, D=192, D_v=104, dropout_p=0.5,
         softcap=2.0),
    Case(name="dropout-256", B=2, H_q=2, H_kv=1, M=140, N=200, D=256, D_v=256, dropout_p=0.1,
         mask=Window(100, 3)),
    Case(name="persistent-everything", H_q=4, H_kv=2, M=210, N=270, D=64, D_v=40, dropout_p=0.2,
         mask=(_lengths(270), Dense("1hmn")), bias="1hmn", softcap=2.0, dlse=True),
)  # fmt: skip

HOPPER_VARLEN = (
    VarlenCase(name="without-keys", H_q=4, dlse=True,
               lengths=((200, 0), (70, 140), (0, 5), (193, 0), (33, 260), (5, 0), (64, 1))),
    VarlenCase(name="without-keys-128", H_q=4, D=128, D_v=128, mask=CAUSAL_END,
               lengths=((130, 270), (200, 0), (129, 2), (10, 0), (150, 150))),
    VarlenCase(name="shared-keys", H_q=8, H_kv=1, D=64, D_v=64, mask=CAUSAL_END,
               lengths=((200, 130), (0, 0), (3, 3), (130, 40))),
    VarlenCase(name="many-sequences", H_q=2, D=64, D_v=64, mask=CAUSAL_END,
               lengths=tuple((n % 7 * 9, n % 5 * 11) for n in range(70)), trailing=(40, 20)),
    VarlenCase(name="long-192", lengths=((64, 200), (131, 67)), D=192, D_v=128),
    VarlenCase(name="long-256", lengths=((64, 131), (131, 67)), D=256, D_v=256, trailing=(3, 70)),
)  # fmt: skip
"""Includes sequences without keys, where a warp could run ahead of its warpgroup."""
