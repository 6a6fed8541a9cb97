"""weft.adapters.lightning: a Trainer's run with it is the run of one process on the whole batch."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing.ranks import run_ranks

lightning = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
ROWS, BATCH = 24, 4


class Regression(lightning.LightningModule):
    """Automatic optimisation, or two optimisers by hand, one after the other, as a GAN has them."""

    def __init__(self, by_hand=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.automatic_optimization = not by_hand

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return None

    def validation_step(self, batch, _):
        self.log("checked", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.05)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


def loader(batch):
    """Each rank's rows; the batches of all ranks together are those of one process."""
    made = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(ROWS, 5, generator=made), torch.randn(ROWS, 3, generator=made))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=batch, sampler=own)


def fitted(folder, batch, by_hand, accumulate, **options):
    module = Regression(by_hand)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=None if by_hand else 0.5,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, loader(batch), loader(batch))
    parameters = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return parameters, {name: float(value) for name, value in trainer.callback_metrics.items()}, trainer


def fits(rank, folder, by_hand, accumulate, options):
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    from weft.adapters.lightning import WeftStrategy

    strategy, looks = WeftStrategy(cluster_environment=TorchElasticEnvironment(), **options), Looks()
    parameters, metrics, trainer = fitted(
        folder, BATCH, by_hand, accumulate, devices=2, strategy=strategy, callbacks=[looks]
    )
    assert looks.seen == {weft.DataParallel}
    assert trainer.strategy.model is trainer.lightning_module, "what is left is the module"
    assert dist.get_backend() == "weft"
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    return parameters, metrics


class Looks(lightning.Callback):
    """At what is trained."""

    def __init__(self):
        self.seen = set()

    def on_train_batch_end(self, trainer, *_):
        self.seen.add(type(trainer.strategy.model))


def launched(rank):
    """The environment as torchrun leaves it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("by_hand", "accumulate", "options"),
    [(False, 1, {}), (False, 2, {"bucket_mb": 1e-4}), (True, 1, {"broadcast_buffers": False})],
)
def test_a_fit_is_that_of_one_process(by_hand, accumulate, options, tmp_path):
    expected, logged, _ = fitted(tmp_path / "one", 2 * BATCH, by_hand, accumulate, devices=1)
    ranks = run_ranks(fits, 2, str(tmp_path / "two"), by_hand, accumulate, options, before=launched, timeout_s=180)
    for parameters, metrics in ranks:
        for name, parameter in expected.items():
            assert torch.equal(parameters[name], ranks[0][0][name]), "the same on every rank"
            torch.testing.assert_close(parameters[name], parameter)
        assert metrics.keys() == logged.keys() and all(abs(metrics[name] - logged[name]) < 1e-5 for name in logged)
    saved = torch.load(tmp_path / "two" / "last.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], ranks[0][0][name]) for name in saved)


def test_what_lightning_cannot_do_is_refused():
    from weft.adapters.lightning import WeftStrategy

    for name in ("shard_optimizer", "main_grad"):
        with pytest.raises(ValueError, match=f"{name}=True needs an optimizer"):
            WeftStrategy(**{name: True})
