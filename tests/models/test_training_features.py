"""What surrounds the ops in a training: saving, autocast, checkpointing, hooks, clipping, schedules, loaders, copies."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from families import CASES, LstmLanguageModel
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training import assert_close, misses

DEVICES = ("cpu", "tpu")


@pytest.fixture(autouse=True)
def _highest():
    """CPU is the oracle at six-pass matmuls."""
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        yield


def _mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def _same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name].detach().cpu(), value.detach().cpu(), relative, name, floor=1e-6)


class TestSaving:
    """Models, optimisers and whole objects travel between devices."""

    def test_state_dict_round_trip(self):
        """A state dict of the device loads on the CPU and back, tensors equal, devices kept."""
        model = _mlp().to("tpu")
        model(_batch().to("tpu"))
        other = _mlp(1)
        assert all(p.device.type == "tpu" for p in model.state_dict().values())
        other.load_state_dict(model.state_dict())
        back = _mlp(2).to("tpu")
        back.load_state_dict(other.state_dict())
        for a, b, c in zip(
            model.state_dict().values(), other.state_dict().values(), back.state_dict().values(), strict=True
        ):
            assert torch.equal(a.cpu(), b)
            assert torch.equal(b, c.cpu())

    def test_saved_weights_load_anywhere(self):
        """torch.save on the device; weights_only loading lands on the device, and on the CPU with map_location."""
        model = _mlp().to("tpu")
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        for where, kind in ((None, "tpu"), ("cpu", "cpu"), ("tpu", "tpu"), (torch.device("cpu"), "cpu")):
            buffer.seek(0)
            loaded = torch.load(buffer, map_location=where, weights_only=True)
            assert {value.device.type for value in loaded.values()} == {kind}
            _same(loaded, model.state_dict(), 0.0)

    def test_a_whole_module(self):
        """A pickled module of the device is loaded on the CPU and computes there."""
        model = _mlp().eval()
        expected = model(_batch())
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model).to("tpu"), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, map_location="cpu", weights_only=False)
        assert torch.equal(loaded(_batch()), expected)

    def test_sharing_survives_saving(self):
        """Views of one storage come back as views of one storage."""
        base = torch.arange(6.0).to("tpu")
        buffer = io.BytesIO()
        torch.save([base, base[2:]], buffer)
        buffer.seek(0)
        first, second = torch.load(buffer, weights_only=True)
        first[3] = 40.0
        assert second.tolist() == [2.0, 40.0, 4.0, 5.0]

    def test_resuming_a_training(self):
        """Model, optimiser and schedule restored from a checkpoint continue as if never stopped."""

        def start() -> tuple:
            model = _mlp().to("tpu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def steps(parts: tuple, count: int) -> None:
            model, optimizer, schedule = parts
            for index in range(count):
                optimizer.zero_grad()
                model(_batch(index).to("tpu")).square().mean().backward()
                optimizer.step()
                schedule.step()

        straight, stopped = start(), start()
        steps(straight, 3)
        steps(straight, 3)
        steps(stopped, 3)
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in stopped], buffer)
        buffer.seek(0)
        resumed = start()
        for part, state in zip(resumed, torch.load(buffer, map_location="cpu", weights_only=True), strict=True):
            part.load_state_dict(state)
        assert {v.device.type for s in resumed[1].state.values() for k, v in s.items() if k != "step"} == {"tpu"}
        steps(resumed, 3)
        _same(resumed[0].state_dict(), straight[0].state_dict(), 0.0)


class TestCopies:
    """deepcopy, averaged weights, tied weights."""

    def test_deepcopy_is_independent(self):
        """Training the copy leaves the original; both stay on the device."""
        model = _mlp().to("tpu")
        twin = copy.deepcopy(model)
        before = {name: value.cpu() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        _same(model.state_dict(), before, 0.0)
        assert next(twin.parameters()).device.type == "tpu"

    def test_exponential_average(self):
        """AveragedModel with an EMA follows CPU over three updates."""
        averages = []
        for device in DEVICES:
            model = _mlp().to(device)
            average = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            for step in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.0 + 0.1 * step)
                average.update_parameters(model)
            averages.append(average.state_dict())
        _same(averages[1], averages[0])

    def test_tied_weights_stay_tied(self):
        """Moving a model keeps one parameter where there was one, and its gradient sums both uses."""
        gradients = []
        for device in DEVICES:
            torch.manual_seed(0)
            embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            head.weight = embedding.weight
            model = nn.Sequential(embedding, head).to(device)
            assert model[0].weight is model[1].weight
            assert len(list(model.parameters())) == 1
            model(torch.tensor([1, 2, 1], device=device)).square().sum().backward()
            gradients.append(model[0].weight.grad)
        assert_close(gradients[1].cpu(), gradients[0], 1e-5, "tied gradient")


class TestPrecisionAndMemory:
    """Autocast, gradient scaling, activation checkpointing, accumulation."""

    def test_autocast(self):
        """Linear layers run in bfloat16, the loss in float32, gradients keep the parameters' dtype."""
        model = _mlp().to("tpu")
        with torch.autocast("tpu", torch.bfloat16):
            output = model(_batch().to("tpu"))
            loss = F.mse_loss(output, torch.zeros_like(output))
        assert output.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        expected = _mlp()
        F.mse_loss(expected(_batch()), torch.zeros(5, 3)).backward()
        for a, e in zip(model.parameters(), expected.parameters(), strict=True):
            if e.grad.abs().max() > 1e-6:
                assert_close(a.grad.cpu(), e.grad, 5e-2, "autocast gradient", floor=1e-3)

    def test_bfloat16_model(self):
        """A model wholly in bfloat16 is as near to CPU's bfloat16 as its rounding."""
        results = [_mlp().to(device, torch.bfloat16).eval()(_batch().to(device, torch.bfloat16)) for device in DEVICES]
        assert results[1].dtype == torch.bfloat16
        torch.testing.assert_close(results[1].cpu(), results[0], rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing(self, reentrant):
        """Recomputed activations, dropout included, give the gradients of the stored ones."""
        block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).to("tpu")
        gradients = []
        for checkpointed in (False, True):
            x = _batch().to("tpu").requires_grad_()
            torch.manual_seed(7)
            y = checkpoint(block, x, use_reentrant=reentrant) if checkpointed else block(x)
            block.zero_grad()
            y.square().sum().backward()
            gradients.append({"x": x.grad, **{n: p.grad.clone() for n, p in block.named_parameters()}})
        _same(gradients[1], gradients[0], 1e-6)

    def test_transformers_checkpointing(self):
        """gradient_checkpointing_enable on a Llama leaves the gradients as they are."""
        case = CASES["llama"].build()
        model = case.model.to("tpu")
        inputs = {name: value.to("tpu") for name, value in case.inputs.items()}
        gradients = []
        for enabled in (False, True):
            if enabled:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            model(**inputs, use_cache=False).loss.backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        _same(gradients[1], gradients[0], 1e-5)

    def test_accumulation(self):
        """Two half batches give the gradient of the whole one."""
        model = nn.Linear(6, 2).to("tpu")
        x = torch.randn(4, 6).to("tpu")
        model(x).sum().backward()
        whole = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        for half in x.chunk(2):
            model(half).sum().backward()
        _same({n: p.grad for n, p in model.named_parameters()}, whole, 1e-5)


class TestAroundTheStep:
    """Clipping, schedules, hooks, loaders, frozen parts."""

    @pytest.mark.parametrize("foreach", [None, True, False])
    def test_clipping(self, foreach):
        """clip_grad_norm_ and clip_grad_value_ scale as on the CPU; the norm stays on the device."""
        clipped = []
        for device in DEVICES:
            model = _mlp().to(device)
            model(_batch().to(device)).square().sum().mul(100).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
            assert norm.device.type == device
            nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
            clipped.append({"norm": norm, **{n: p.grad for n, p in model.named_parameters()}})
        _same(clipped[1], clipped[0], 1e-4)

    def test_a_changing_learning_rate_compiles_nothing(self):
        """The rate of a schedule is an input of the module: steps after the second compile nothing, and follow CPU."""
        finals = []
        for device in DEVICES:
            model = _mlp().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            for step in range(5):
                if step == 2:
                    steady = misses()
                optimizer.zero_grad()
                model(_batch().to(device)).square().mean().backward()
                optimizer.step()
                schedule.step()
            assert misses() == steady
            finals.append(model.state_dict())
        _same(finals[1], finals[0])

    def test_hooks(self):
        """Forward, pre-forward, full backward and tensor hooks see the device's tensors, and may replace them."""
        seen = []
        model = _mlp().to("tpu")
        model[0].register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].device.type)))
        model[0].register_forward_hook(lambda m, args, out: out * 2)
        model[3].register_full_backward_hook(lambda m, gi, go: seen.append(("backward", go[0].device.type)))
        model[3].weight.register_hook(lambda grad: grad * 0)
        model[3].bias.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad.device.type)))
        model(_batch().to("tpu")).sum().backward()
        assert sorted(seen) == [("accumulated", "tpu"), ("backward", "tpu"), ("pre", "tpu")]
        assert model[3].weight.grad.abs().max().item() == 0

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_loader_with_pinned_memory(self, workers):
        """Batches pinned by the loader and moved without blocking hold the data, also from worker processes."""
        data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
        context = {"multiprocessing_context": "spawn"} if workers else {}
        loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers, **context)
        moved = [(x.to("tpu", non_blocking=True), y.to("tpu", non_blocking=True)) for x, y in loader]
        assert torch.equal(torch.cat([x for x, _ in moved]).cpu(), torch.arange(24.0).view(12, 2))
        assert torch.cat([y for _, y in moved]).tolist() == list(range(12))

    def test_frozen_layers(self):
        """Frozen parameters get no gradient and do not move."""
        model = _mlp().to("tpu")
        model[0].requires_grad_(False)
        before = model[0].weight.cpu()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(_batch().to("tpu")).sum().backward()
        optimizer.step()
        assert model[0].weight.grad is None
        assert torch.equal(model[0].weight.cpu(), before)

    def test_printing(self):
        """A model, a parameter and a loss print with their device and values."""
        model = nn.Linear(2, 1).to("tpu")
        assert "Linear(in_features=2" in repr(model)
        assert "device='tpu:0'" in repr(model.weight)
        assert repr(torch.tensor([1.5, 2.0], device="tpu")) == "tensor([1.5000, 2.0000], device='tpu:0')"

    def test_parametrizations(self):
        """Spectral norm trains on the device as on the CPU; of weight norm TorchTPU lacks the gradient."""
        gradients = []
        for device in DEVICES:
            torch.manual_seed(0)
            layers = [nn.Linear(6, 6), nn.Linear(6, 4)]
            nn.utils.parametrizations.spectral_norm(layers[1])
            model = nn.Sequential(*layers).to(device)
            model(_batch().to(device)).square().sum().backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        _same(gradients[1], gradients[0], 1e-3)


class TestFunctionalTransforms:
    """torch.func over a whole model."""

    def test_functional_call(self):
        """Other weights, same module."""
        model, weights = _mlp().eval().to("tpu"), {n: p.detach() * 2 for n, p in _mlp().named_parameters()}
        expected = torch.func.functional_call(_mlp().eval(), weights, _batch())
        actual = torch.func.functional_call(model, {n: p.to("tpu") for n, p in weights.items()}, _batch().to("tpu"))
        assert_close(actual.detach().cpu(), expected.detach(), 1e-5, "functional_call")

    @pytest.mark.parametrize("transform", ["grad", "per-sample", "jacrev", "jvp", "hvp"])
    def test_transforms(self, transform):
        """Gradients, per-sample gradients, Jacobians, forward mode and Hessian products agree with CPU."""
        results = []
        for device in DEVICES:
            model = _mlp().eval().to(device)
            x = _batch().to(device)
            weights = {n: p.detach() for n, p in model.named_parameters()}
            buffers = dict(model.named_buffers())

            def run(w: dict, given: torch.Tensor, model=model, buffers=buffers) -> torch.Tensor:
                return torch.func.functional_call(model, (w, buffers), (given,)).square().mean()

            results.append(self._apply(transform, run, weights, x))
        _same(results[1], results[0], 1e-4)

    @staticmethod
    def _apply(transform: str, run, weights: dict, x: torch.Tensor) -> dict[str, torch.Tensor]:
        func = torch.func
        if transform == "grad":
            return func.grad(run)(weights, x)
        if transform == "per-sample":
            return func.vmap(func.grad(run), (None, 0))(weights, x.unsqueeze(1))
        if transform == "jacrev":
            return {"x": func.jacrev(run, 1)(weights, x)}
        if transform == "jvp":
            return {"x": func.jvp(lambda given: run(weights, given), (x,), (torch.ones_like(x),))[1]}
        return {"x": func.jvp(func.grad(lambda given: run(weights, given)), (x,), (torch.ones_like(x),))[1]}

    def test_ensembles(self):
        """stack_module_state and vmap run three models at once."""
        outputs = []
        for device in DEVICES:
            models = [_mlp(seed).eval().to(device) for seed in range(3)]
            parameters, buffers = torch.func.stack_module_state(models)
            skeleton = copy.deepcopy(models[0]).to("meta")

            def call(p: dict, b: dict, x: torch.Tensor, skeleton=skeleton) -> torch.Tensor:
                return torch.func.functional_call(skeleton, (p, b), (x,))

            outputs.append(torch.func.vmap(call, (0, 0, None))(parameters, buffers, _batch().to(device)).detach())
        assert_close(outputs[1].cpu(), outputs[0], 1e-4, "ensemble")


class TestWhereModelsAreMade:
    """Default device, meta device, device_map."""

    def test_made_on_the_device(self):
        """Modules built under a device context live there and train."""
        with torch.device("tpu"):
            model = LstmLanguageModel()
            ids = torch.randint(0, 100, (2, 5))
        assert {p.device.type for p in model.parameters()} == {"tpu"}
        model(ids).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())

    def test_from_meta(self):
        """to_empty and a loaded state dict make a meta model real on the device."""
        source = _mlp().eval()
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))
        model.to_empty(device="tpu").load_state_dict(source.state_dict())
        assert_close(model.eval()(_batch().to("tpu")).detach().cpu(), source(_batch()).detach(), 1e-5, "from meta")

    def test_pretrained_folder(self, tmp_path):
        """save_pretrained from the device, from_pretrained, the same logits."""
        case = CASES["llama"].build()
        expected = case.model.eval()(case.inputs["input_ids"]).logits
        case.model.to("tpu").save_pretrained(tmp_path)
        loaded = type(case.model).from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(case.inputs["input_ids"]).logits, expected)

    def test_device_map(self, tmp_path):
        """from_pretrained with device_map="tpu" loads onto the device: the same logits, tied heads, a training step."""
        pytest.importorskip("accelerate", reason="install emutpu[models]")
        case = CASES["llama"].build()
        expected = case.model.eval()(case.inputs["input_ids"]).logits
        case.model.save_pretrained(tmp_path)
        for where in ("tpu", {"": "tpu:0"}):
            model = type(case.model).from_pretrained(tmp_path, device_map=where).eval()
            assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"tpu"}
            with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
                logits = model(case.inputs["input_ids"].to("tpu")).logits
            assert_close(logits.detach().cpu(), expected.detach(), 1e-4, f"device_map={where}")
        loss = model.train()(**{name: value.to("tpu") for name, value in case.inputs.items()}).loss
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
