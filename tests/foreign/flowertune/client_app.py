"""flowertune: the ClientApp, which sends its adapters alone."""

import warnings

from flowertune.dataset import load_data, tokenized
from flowertune.models import cosine_annealing, get_model, get_tokenizer
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
warnings.filterwarnings("ignore", category=UserWarning)

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Fine-tune the adapters on local data."""
    config = context.run_config
    partition_id, num_partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    texts = load_data(config["dataset.path"], partition_id, num_partitions, config["dataset.examples"])
    tokenizer = get_tokenizer(config["model.name"])

    model = get_model(config)
    set_peft_model_state_dict(model, msg.content["arrays"].to_torch_state_dict())

    new_lr = cosine_annealing(
        msg.content["config"]["server-round"],
        config["num-server-rounds"],
        config["train.learning-rate-max"],
        config["train.learning-rate-min"],
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=msg.content["config"]["save_path"],
            learning_rate=new_lr,
            optim=config["train.optim"],
            lr_scheduler_type="constant",
            max_steps=config["train.max-steps"],
            per_device_train_batch_size=config["train.batch-size"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=tokenized(texts, tokenizer, config["train.seq-length"]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    results = trainer.train()

    metrics = {"train_loss": results.training_loss, "num-examples": len(texts)}
    content = {"arrays": ArrayRecord(get_peft_model_state_dict(model)), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)
