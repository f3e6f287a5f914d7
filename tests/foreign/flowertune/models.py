"""flowertune: the base model from a folder or the hub, with LoRA's adapters."""

import math

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def cosine_annealing(current_round: int, total_round: int, lrate_max: float, lrate_min: float) -> float:
    cos_inner = math.pi * current_round / total_round
    return lrate_min + 0.5 * (lrate_max - lrate_min) * (1 + math.cos(cos_inner))


def get_tokenizer(model_name: str):
    tokenizer = AutoTokenizer.from_pretrained(model_name, use_fast=True, padding_side="right")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def get_model(config):
    model = AutoModelForCausalLM.from_pretrained(config["model.name"])
    model.config.use_cache = False
    peft_config = LoraConfig(
        r=config["model.lora.peft-lora-r"],
        lora_alpha=config["model.lora.peft-lora-alpha"],
        lora_dropout=config["model.lora.peft-lora-dropout"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, peft_config)
