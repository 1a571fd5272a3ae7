"""Process-local stand-ins that let SGLang's real MiniMax-H3 pipeline run without a GPU. No installed file is edited.

Each one is named, and the names go into the record: whoever reads a CPU result sees what was replaced. `install_*`
functions patch names inside SGLang's modules, so they must run in every process that uses them, before the pipeline
is built.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from engine.checkpoint.presets import Preset

H3 = "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3."


def declare_torchvision_operators() -> str:
    """Declare two operator schemas of torchvision.

    torchvision on PyPI is a CUDA build whose C++ operators do not load beside a CPU torch, yet its import registers
    fakes for them.
    """
    global _torchvision  # the library must outlive this call, or the declarations vanish
    try:
        _torchvision = torch.library.Library("torchvision", "DEF")
        _torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:  # the real operators are there
        pass
    return "cpu.torchvision_schemas"


_torchvision: Any = None


class _TorchOnCpu:
    """The name `torch` inside one module: CUDA looks available, and the device "cuda" is the CPU."""

    class _Cuda:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cuda, name)

        @staticmethod
        def is_available() -> bool:
            return True

    cuda = _Cuda()

    @staticmethod
    def device(*args: Any, **kwargs: Any) -> torch.device:
        if args and isinstance(args[0], str) and args[0].startswith("cuda"):
            return torch.device("cpu")
        return torch.device(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install_denoising_on_cpu() -> str:
    """`MiniMaxH3DenoisingStage._run_full_loop` is the one SGLang function that refuses a CPU."""
    importlib.import_module(H3 + "stages.denoising").torch = _TorchOnCpu()  # type: ignore[attr-defined]
    return "cpu.denoising_device"


def _vae_overrides(preset: Preset) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return dict(preset.video_vae), dict(preset.video_vae_decoder), dict(preset.audio_vae)


def install_shrunken_vaes(preset: Preset) -> str:
    """VAE sizes are hard-coded in SGLang, with no configuration key; the synthetic presets shrink them."""
    from sglang.multimodal_gen.runtime.models.vaes import minimax_h3 as vaes

    video, decoder, audio = _vae_overrides(preset)
    video_init, audio_init = vaes.AutoencoderKLLegacy.__init__, vaes.DacAudioVAE.__init__

    def small_video(self: Any, **kwargs: Any) -> None:
        video_init(self, **{**kwargs, **video, "vit_decoder_kwargs": {**kwargs["vit_decoder_kwargs"], **decoder}})

    def small_audio(self: Any, **kwargs: Any) -> None:
        audio_init(self, **{**kwargs, **audio})

    vaes.AutoencoderKLLegacy.__init__, vaes.DacAudioVAE.__init__ = small_video, small_audio
    return "cpu.shrunken_vaes"


@contextlib.contextmanager
def shrunken_vaes(preset: Preset) -> Iterator[None]:
    """`install_shrunken_vaes` for the length of a block."""
    from sglang.multimodal_gen.runtime.models.vaes import minimax_h3 as vaes

    before = vaes.AutoencoderKLLegacy.__init__, vaes.DacAudioVAE.__init__
    install_shrunken_vaes(preset)
    try:
        yield
    finally:
        vaes.AutoencoderKLLegacy.__init__, vaes.DacAudioVAE.__init__ = before


def install_small_targets() -> str:
    """SGLang admits short_edge 768 and 4 to 15 seconds; a CPU run asks for less. Everything else is still validated."""
    validation = importlib.import_module(H3 + "request_validation")
    plan = importlib.import_module(H3 + "resolved_plan")
    validate = validation._validate_target

    def admit(target: Any, *, profile: Any) -> Any:
        checked = validate({**target, "short_edge": 768, "duration_seconds": 5.0}, profile=profile)
        checked["short_edge"] = int(target["short_edge"])
        checked["duration_seconds"] = float(target["duration_seconds"])
        return checked

    validation._validate_target = admit  # type: ignore[attr-defined]
    plan._validate_base_short_edge = int  # type: ignore[attr-defined]
    return "cpu.small_targets"


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


def install_cpu_streams() -> str:
    """Streams and events that do nothing, and device index 0: SGLang's layer-wise offload asks `torch.cpu` for them."""
    current = _Stream()
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
    torch.cpu.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cpu.Event = _Event  # type: ignore[attr-defined]
    torch.cpu.current_stream = lambda *args: current  # type: ignore[assignment]
    torch.cpu.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    return "cpu.streams"
