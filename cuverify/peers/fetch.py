"""Fetch the peers that are not installed, and lay them out in a folder.

``python -m cuverify.peers.fetch DIR`` downloads four wheels by pip, about 350 MB, and keeps 21 MB:
SGLang's Triton files with the few names around them that they import, the FlashAttention 3 library
of vLLM, and FlashInfer's wheel for its headers. Everything there is other people's work under its
own licence: keep the folder out of version control and out of packages.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cuverify.errors import ToolchainError
from cuverify.peers.flash_attention_3 import LIBRARY
from cuverify.peers.laid_out import SGLANG_FOLDER

SGLANG, VLLM, FLASHINFER = "sglang==0.5.23", "vllm==0.33.0", "flashinfer-python==0.6.8"

_BINARY = (
    "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp",
    "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64",
    "--platform", "manylinux2014_x86_64",
)  # fmt: skip

SGLANG_FILES = tuple(
    f"sglang/kernels/ops/{name}.py"
    for name in (
        "attention/extend_attention",
        "attention/decode_attention",
        "attention/score_mod",
        "attention/merge_state",
        "kvcache/cache_move",
    )
)

# What those files import of SGLang: nothing of it changes what a kernel does on a CUDA device.
_ENVIRONMENT = """\
class _Unset:
    def get(self):
        return False


class _Variables:
    def __getattr__(self, name):
        return _Unset()


envs = _Variables()
"""
_UTILITIES = """\
import torch


def is_cuda():
    return torch.cuda.is_available()


def _no(*arguments, **keywords):
    return False


is_hip = is_cpu = is_npu = is_xpu = is_musa = is_gfx95_supported = is_gfx1250_supported = _no


def get_device_core_count(device=0):
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(number):
    return 1 << max(0, int(number) - 1).bit_length()
"""
_PLATFORM = "def reject_out_of_tree_path(*arguments, **keywords):\n    pass\n"

STAND_INS = {
    "sglang/__init__.py": "",
    "sglang/kernels/__init__.py": "",
    "sglang/kernels/ops/__init__.py": "",
    "sglang/kernels/ops/attention/__init__.py": "",
    "sglang/kernels/ops/kvcache/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/environ.py": _ENVIRONMENT,
    "sglang/srt/utils.py": _UTILITIES,
    "sglang/srt/platforms/__init__.py": "current_platform = None\n",
    "sglang/srt/platforms/interface.py": _PLATFORM,
}


def fetch(folder: Path) -> None:
    """Download and lay out everything.

    Parameters
    ----------
    folder : Path
        Made if it is not there.

    Raises
    ------
    ToolchainError
        pip could not download a wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cuverify-fetch-") as place:
        wheels = Path(place)
        _download(SGLANG, wheels)
        lay_out_sglang(_only(wheels, "sglang-*.whl"), folder / SGLANG_FOLDER)
        _download(VLLM, wheels, _BINARY)
        pack(_only(wheels, "vllm-*.whl"), f"vllm/vllm_flash_attn/{LIBRARY}", folder)
    _download(FLASHINFER, folder)


def lay_out_sglang(wheel: Path, folder: Path) -> None:
    """Write SGLang's kernel files, and stand-ins for what they import, below a folder."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in SGLANG_FILES}
    contents.update({name: text.encode() for name, text in STAND_INS.items()})
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def pack(wheel: Path, member: str, folder: Path) -> None:
    """Write a member of a wheel, compressed, into a folder: NAME.xz."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(member)
    (folder / f"{Path(member).name}.xz").write_bytes(lzma.compress(content, preset=6))


def _download(requirement: str, folder: Path, options: Sequence[str] = ()) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", str(folder),
        requirement,
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise ToolchainError(f"pip could not download {requirement}")


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cuverify.peers.fetch DIR")
    fetch(Path(sys.argv[1]))
