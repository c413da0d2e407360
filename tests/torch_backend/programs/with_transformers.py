"""The Trainer of transformers, on a small model that is made from its configuration.

It is built on Accelerate, which on a CPU refuses other backends than gloo as ``ddp_backend``, and takes a group that is
there.
"""

import sys
import tempfile

import regression
import torch
import transformers

torch.distributed.init_process_group(sys.argv[1])
folder = tempfile.TemporaryDirectory()
args = transformers.TrainingArguments(
    output_dir=folder.name,
    use_cpu=True,
    max_steps=regression.STEPS,
    per_device_train_batch_size=4,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(7)
shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **shape)
tokens = torch.randint(64, (64, 12))
samples = [{"input_ids": row, "labels": row} for row in tokens]
trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=samples)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
regression.report(args.process_index, args.world_size, losses)
