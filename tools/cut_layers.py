"""Make a smaller model from some layers of a larger one, as a student for distillation.

    python tools/cut_layers.py MODEL OUTPUT --keep 10

Keeps 10 decoder layers, evenly spaced. Embeddings, norms, head and tokenizer stay the same. The result is far worse
than the original until it is distilled.
"""

import argparse
from pathlib import Path


def main() -> None:
    """Cut the layers and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model directory or hub id")
    parser.add_argument("output", type=Path, help="directory to write")
    parser.add_argument("--keep", type=int, required=True, help="number of decoder layers to keep")
    options = parser.parse_args()
    import torch  # not for --help

    from tropism.model import load, save
    from tropism.model.source import ModelSource

    source = ModelSource.of(options.model)
    model = load.load_model(source, "fp32", torch.device("cpu"))
    layers = model.get_decoder().layers
    if not 0 < options.keep <= len(layers):
        parser.error(f"--keep must be between 1 and {len(layers)}, the number of layers of this model")
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
