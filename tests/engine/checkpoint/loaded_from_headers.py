"""Writes the tiny checkpoint twice, with data and as headers alone, and reads both through SGLang's own readers.

A process of its own: it replaces names inside SGLang. `python loaded_from_headers.py FOLDER` prints JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

LOADER = "sglang.multimodal_gen.runtime.loader."


def main(root: Path) -> None:
    os.environ["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    importlib.import_module("engine.h3.cpu").declare_torchvision_operators()
    import torch

    from engine.checkpoint import presets
    from engine.checkpoint.deferred import install_deferred_loading
    from engine.checkpoint.synthesise import synthesise

    synthesise(root / "files", "tiny", 0)
    presets.PRESETS["tiny"] = replace(presets.PRESETS["tiny"], with_data=False)
    synthesise(root / "headers", "tiny", 0)
    install_deferred_loading()
    iterate = importlib.import_module(LOADER + "weight_utils").safetensors_weights_iterator
    vae_loader = importlib.import_module(LOADER + "component_loaders.vae_loader")
    tensors, different = {}, []
    for component in ("transformer", "text_encoder", "video_vae/source", "audio_vae"):
        (path,) = (root / "files/MiniMax-H3/FL2VA" / component).glob("*.safetensors")
        header = root / "headers" / path.relative_to(root / "files")
        if "vae" in component:
            real, drawn = (vae_loader.safetensors_load_file(str(x)) for x in (path, header))
        else:
            real, drawn = (dict(iterate([str(x)])) for x in (path, header))
        tensors[component] = len(real)
        different += [name for name in real.keys() ^ drawn.keys()]
        different += [
            name
            for name in real.keys() & drawn.keys()
            if real[name].dtype != drawn[name].dtype or not torch.equal(real[name], drawn[name].to("cpu"))
        ]
    sizes = {
        kind: sum(path.stat().st_size for path in (root / kind).rglob("*.safetensors")) for kind in ("files", "headers")
    }
    print(
        json.dumps(
            {
                "tensors": tensors,
                "different": different,
                "bytes of files": sizes["files"],
                "bytes of headers": sizes["headers"],
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
