"""Digit recognition with transformers' Trainer over MPI: a small vision transformer, made from its configuration.

    torchmpirun -n 2 examples/transformers_trainer.py
    2 ranks on 'torchmpi', trained by the Trainer: test accuracy 96.39 %

The line that ends in "# mpi" is all that is added. It comes first: the Trainer takes a group that is there, refuses the
name as ddp_backend= on a CPU, and makes a group of gloo where it finds none. Wants
`pip install transformers accelerate`.
"""

import tempfile

import digits_data
import torch.distributed as dist
import transformers

parser = digits_data.parser(__doc__)
parser.set_defaults(lr=0.003)  # AdamW's
options = parser.parse_args()
dist.init_process_group("torchmpi")  # mpi

train_set, test_set, _ = digits_data.prepare(options)
network = transformers.ViTForImageClassification(
    transformers.ViTConfig(
        image_size=train_set.tensors[0].shape[-1],
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=10,
    )
)
curve = digits_data.Curve(
    options, network, test_set, lambda network, data: digits_data.accuracy(lambda x: network(x).logits, data)
)


class Watch(transformers.TrainerCallback):
    """The curve of the examples."""

    def on_step_begin(self, args, state, control, **kwargs):
        """A step begins."""
        curve.step()

    def on_epoch_end(self, args, state, control, **kwargs):
        """Test, if a curve is wanted."""
        curve.end_epoch()


with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch // dist.get_world_size(),
        learning_rate=options.lr,
        seed=options.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    samples = [{"pixel_values": image, "labels": label} for image, label in train_set]
    trainer = transformers.Trainer(network, arguments, train_dataset=samples, callbacks=[Watch()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()

network.eval()
accuracy = curve.end()
if dist.get_rank() == 0:
    ranks, backend = arguments.world_size, dist.get_backend()
    print(f"{ranks} ranks on {backend!r}, trained by the Trainer: test accuracy {100 * accuracy:.2f} %")
dist.destroy_process_group()
