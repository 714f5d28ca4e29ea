"""The check that the site's reference has every public name; `make docs` runs it after mkdocs."""

from __future__ import annotations

import zlib
from pathlib import Path

from building.site import documented, missing_names


def test_names_that_the_reference_lacks_are_found(tmp_path: Path) -> None:
    every = set(missing_names(set()))
    public = {"transformer_kernels.attention", "transformer_kernels.nn.Stack"}
    assert every >= public
    assert not any(name.endswith(("__version__", "fmha", "unbind")) for name in every)
    inventory = tmp_path / "objects.inv"
    lines = "".join(f"{name} py:function 1 reference/#$ -\n" for name in every - public)
    inventory.write_bytes(b"# a\n# b\n# c\n# d\n" + zlib.compress(lines.encode()))
    assert set(missing_names(documented(inventory))) == public
