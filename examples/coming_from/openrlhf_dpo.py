"""A DPO script as it is written for OpenRLHF 0.9.5. Only the import of the trainer has changed.

    python examples/coming_from/openrlhf_dpo.py MODEL [--ckpt_path DIR] [--save_path DIR]

openrlhf_stand_ins.py replaces the rest of openrlhf, so that the example runs without it. If it is installed, import
that instead.
"""

import argparse
import math
import os

from openrlhf_stand_ins import (
    Actor,
    RewardDataset,
    get_strategy,
    get_tokenizer,
    pairs,
    parser,
    updates,
)
from transformers.trainer import get_scheduler

from tropism.compat.openrlhf import DPOTrainer


def train(args: argparse.Namespace) -> None:
    strategy = get_strategy(args)
    strategy.setup_distributed()

    model = Actor(args.pretrain)
    tokenizer = get_tokenizer(args.pretrain, model.model, "right", strategy)
    ref_model = Actor(args.pretrain)
    optim = strategy.create_optimizer(model, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.l2)

    train_dataset = RewardDataset(pairs(slice(0, 9)), tokenizer)
    train_dataloader = strategy.setup_dataloader(
        train_dataset, args.micro_train_batch_size, True, True, train_dataset.collate_fn)
    eval_dataset = RewardDataset(pairs(slice(9, None)), tokenizer)
    eval_dataloader = strategy.setup_dataloader(
        eval_dataset, args.micro_train_batch_size, True, False, eval_dataset.collate_fn)

    num_update_steps_per_epoch, max_steps = updates(train_dataset, args)
    scheduler = get_scheduler(
        "cosine_with_min_lr", optim,
        num_warmup_steps=math.ceil(max_steps * args.lr_warmup_ratio),
        num_training_steps=max_steps,
        scheduler_specific_kwargs={"min_lr": args.learning_rate * 0.1},
    )
    ((model, optim, scheduler), ref_model) = strategy.prepare((model, optim, scheduler), ref_model)

    os.makedirs(args.save_path, exist_ok=True)
    trainer = DPOTrainer(
        model=model,
        ref_model=ref_model,
        tokenizer=tokenizer,
        strategy=strategy,
        optim=optim,
        train_dataloader=train_dataloader,
        eval_dataloader=eval_dataloader,
        scheduler=scheduler,
        max_norm=args.max_norm,
        beta=args.beta,
        max_epochs=args.max_epochs,
    )
    consumed_samples = 0
    trainer.fit(args, consumed_samples, num_update_steps_per_epoch)
    trainer.evaluate(eval_dataloader, steps=max_steps)

    strategy.save_model(model, tokenizer, args.save_path)


if __name__ == "__main__":
    arguments = parser("DPO as OpenRLHF's script does it", "dpo")
    arguments.add_argument("--beta", type=float, default=0.1, help="default: 0.1")
    arguments.add_argument("--ipo", action="store_true", help="IPO instead of DPO")
    arguments.add_argument("--label_smoothing", type=float, default=0.0, help="share of flipped labels, default: 0")
    arguments.add_argument("--nll_loss_coef", type=float, default=0.0, help="weight of the likelihood, default: 0")
    train(arguments.parse_args())
