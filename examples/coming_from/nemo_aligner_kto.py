"""A KTO script as it is written for NeMo-Aligner. Only the import of the trainer and its collate function has changed.

    python examples/coming_from/nemo_aligner_kto.py MODEL [--log_dir DIR] [--max_time_per_run DD:HH:MM:SS]

nemo_stand_ins.py replaces NeMo, NeMo-Aligner's models and datasets, and OmegaConf, so that the example runs without
them. The model inside is a transformers model: Tropism does not train Megatron's.
"""

import argparse
from functools import partial

import torch
from nemo_stand_ins import (
    CheckpointCallback,
    CustomLoggerWrapper,
    DictConfig,
    KTODataset,
    MegatronGPTKTOModel,
    Timer,
    build_dataloader,
)

from tropism.compat.nemo_aligner import KTOTrainer, kto_custom_collate


def main(cfg: DictConfig) -> None:
    logger = CustomLoggerWrapper()
    ptl_model = MegatronGPTKTOModel(cfg.pretrained_checkpoint.restore_from_path, cfg.model)

    collate_fn = partial(
        kto_custom_collate,
        eos_id=ptl_model.tokenizer.eos_id,
        reset_position_ids=cfg.model.data.get("reset_position_ids", False),
        reset_attention_mask=cfg.model.data.get("reset_attention_mask", False),
        eod_mask_loss=cfg.model.data.get("eod_mask_loss", False),
    )
    train_dataloader, val_dataloader = (
        build_dataloader(
            cfg=cfg,
            dataset=KTODataset(ptl_model.tokenizer.tokenizer, share, cfg.model.data.seq_length),
            consumed_samples=0,
            gbs=cfg.model.global_batch_size,
            collate_fn=collate_fn,
        ) for share in (slice(0, 16), slice(16, None)))

    optimizer = torch.optim.AdamW(ptl_model.parameters(), lr=5e-5, weight_decay=0.1, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=9e-7)
    ckpt_callback = CheckpointCallback(cfg.exp_manager.explicit_log_dir, ptl_model)

    logger.log_hyperparams(cfg)

    timer = Timer(cfg.exp_manager.get("max_time_per_run"))
    kto_trainer = KTOTrainer(
        cfg=cfg.trainer.kto,
        model=ptl_model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader=train_dataloader,
        val_dataloader=val_dataloader,
        test_dataloader=None,
        logger=logger,
        ckpt_callback=ckpt_callback,
        run_timer=timer,
    )
    kto_trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="KTO as NeMo-Aligner's script does it")
    parser.add_argument("model", metavar="MODEL", help="directory or hub id")
    parser.add_argument("--log_dir", default="results", help="directory for checkpoints")
    parser.add_argument("--max_time_per_run", help="DD:HH:MM:SS")
    arguments = parser.parse_args()
    main(DictConfig({
        "trainer": {"kto": {
            "max_epochs": 2, "max_steps": -1, "val_check_interval": 0.5, "save_interval": 2, "limit_train_batches": 1.0,
            "limit_val_batches": 1.0, "gradient_clip_val": 1.0}},
        "exp_manager": {"explicit_log_dir": arguments.log_dir, "max_time_per_run": arguments.max_time_per_run},
        "pretrained_checkpoint": {"restore_from_path": arguments.model},
        "model": {
            "micro_batch_size": 2, "global_batch_size": 4, "seed": 1234,
            "kto": {"ref_policy_kl_penalty": 0.2, "desirable_loss_weight": 1.0, "undesirable_loss_weight": 1.0,
                    "preference_average_log_probs": False},
            "data": {"seq_length": 256}},
    }))
