"""A KTO script as it is written for ColossalChat (coati). Only the import of the trainer has changed.

    python examples/coming_from/coati_kto.py MODEL [--save_dir DIR] [--log_dir DIR]

colossalai_stand_ins.py and coati_data.py replace colossalai and coati's dataset module, so that the example runs
without them. With both installed, import theirs.
"""

import argparse
import os

import torch
from coati_data import DataCollatorForKTODataset, load_tokenized_dataset
from colossalai_stand_ins import (
    Booster,
    CosineAnnealingWarmupLR,
    DistCoordinator,
    LowLevelZeroPlugin,
    StatefulDistributedSampler,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from tropism.compat.coati import KTOTrainer


def train(args: argparse.Namespace) -> None:
    coordinator = DistCoordinator()
    plugin = LowLevelZeroPlugin(stage=2, precision=args.mixed_precision, max_norm=args.grad_clip)
    booster, ref_booster = Booster(plugin=plugin), Booster(plugin=plugin)

    model = AutoModelForCausalLM.from_pretrained(args.pretrain)
    ref_model = AutoModelForCausalLM.from_pretrained(args.pretrain)
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    tokenizer.pad_token = tokenizer.eos_token

    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)

    loaders = []
    for share in (slice(0, 16), slice(16, None)):
        loaders.append(plugin.prepare_dataloader(
            dataset=load_tokenized_dataset(tokenizer, share),
            batch_size=args.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=DataCollatorForKTODataset(tokenizer=tokenizer, max_length=args.max_length),
            distributed_sampler_cls=StatefulDistributedSampler,
        ))
    train_dataloader, eval_dataloader = loaders

    num_update_steps_per_epoch = len(train_dataloader) // args.accumulation_steps
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer=optim,
        total_steps=args.max_epochs * num_update_steps_per_epoch,
        warmup_steps=1,
        eta_min=0.1 * args.lr,
    )
    model, optim, _, train_dataloader, lr_scheduler = booster.boost(
        model=model, optimizer=optim, lr_scheduler=lr_scheduler, dataloader=train_dataloader)
    ref_model, _, _, _, _ = ref_booster.boost(model=ref_model, dataloader=train_dataloader)

    trainer = KTOTrainer(
        actor=model,
        ref_model=ref_model,
        booster=booster,
        actor_optim=optim,
        plugin=plugin,
        actor_lr_scheduler=lr_scheduler,
        tokenizer=tokenizer,
        max_epochs=args.max_epochs,
        accumulation_steps=args.accumulation_steps,
        start_epoch=0,
        save_interval=args.save_interval,
        save_dir=args.save_dir,
        coordinator=coordinator,
        beta=args.beta,
        desirable_weight=args.desirable_weight,
        undesirable_weight=args.undesirable_weight,
        apply_loss_mask=not args.disable_loss_mask,
    )
    trainer.fit(
        train_preference_dataloader=train_dataloader,
        eval_preference_dataloader=eval_dataloader,
        log_dir=args.log_dir,
        use_wandb=args.use_wandb,
    )
    if args.save_dir is not None:
        booster.save_model(model, os.path.join(args.save_dir, "modeling"), shard=True)
        coordinator.print_on_master(f"Saved final model checkpoint at folder {args.save_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="KTO as coati's script does it")
    parser.add_argument("pretrain", metavar="MODEL", help="directory or hub id")
    parser.add_argument("--save_dir", help="directory for checkpoints, evaluations and the model")
    parser.add_argument("--log_dir", help="directory for TensorBoard")
    parser.add_argument("--use_wandb", action="store_true")
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulation_steps", type=int, default=2)
    parser.add_argument("--save_interval", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--mixed_precision", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--desirable_weight", type=float, default=1.0)
    parser.add_argument("--undesirable_weight", type=float, default=1.0)
    parser.add_argument("--disable_loss_mask", action="store_true")
    train(parser.parse_args())
