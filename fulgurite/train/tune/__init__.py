"""Fine-tuning: LoRA and QLoRA, instruction tuning, DPO, GRPO."""
