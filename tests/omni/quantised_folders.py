"""Tiny folders of quantised weights, and the models that transformers makes of their numbers."""

import json
from pathlib import Path

import torch
from open_model_folders import make
from safetensors.torch import save_file

BLOCK = (16, 32)


def make_mxfp4(folder: Path) -> torch.nn.Module:
    """gpt-oss as it is published: experts in blocks and scales."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, generator = make("gpt_oss", folder), torch.Generator().manual_seed(1)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 125, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
    return written(folder, model, tensors, {"quant_method": "mxfp4"})


def make_fp8(folder: Path) -> torch.nn.Module:
    """Qwen3 with all linears of its layers in E4M3, and scales for blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    model = make("qwen3", folder)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        (rows, columns), (high, wide) = weight.shape, BLOCK
        blocks = weight.view(rows // high, high, columns // wide, wide)
        scales = blocks.abs().amax((1, 3)) / 448
        numbers = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors |= {name: numbers, f"{name}_scale_inv": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(Fp8Dequantize(None)._dequantize_one(numbers, scales))
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return written(folder, model, tensors, said | {"weight_block_size": list(BLOCK)})


def written(
    folder: Path, model: torch.nn.Module, tensors: dict[str, torch.Tensor], said: dict[str, object]
) -> torch.nn.Module:
    """Put tensors in place of those of a folder, in two files and an index."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    names = sorted(tensors)
    placed = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous().clone() for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return model
