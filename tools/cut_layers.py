"""Make a smaller model out of some layers of a larger one, as a student for distillation.

    python tools/cut_layers.py MODEL OUTPUT --keep 10

Keeps that many decoder layers, evenly spaced, with embeddings, norms, head and tokenizer as they are. The result is
far worse than the model it came from until it is trained; that is what distillation is for.
"""

import argparse
from pathlib import Path

import torch

from tropism.model import load, save
from tropism.model.source import ModelSource


def main() -> None:
    """Cut and write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model")
    arguments.add_argument("output", type=Path)
    arguments.add_argument("--keep", type=int, required=True)
    options = arguments.parse_args()
    source = ModelSource.of(options.model)
    model = load.load_model(source, "fp32", torch.device("cpu"))
    layers = model.get_decoder().layers
    if not 0 < options.keep <= len(layers):
        arguments.error(f"--keep must be between 1 and {len(layers)}, the layers of this model")
    kept = [round(position * len(layers) / options.keep) for position in range(options.keep)]
    model.get_decoder().layers = torch.nn.ModuleList(layers[index] for index in kept)
    for position, layer in enumerate(model.get_decoder().layers):
        if hasattr(layer.self_attn, "layer_idx"):
            layer.self_attn.layer_idx = position
    config = model.config.get_text_config()
    config.num_hidden_layers = options.keep
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    save.export(model, load.load_tokenizer(source), options.output, torch.float32, [])
    print(f"{options.output}: layers {', '.join(map(str, kept))} of {len(layers)}")


if __name__ == "__main__":
    main()
