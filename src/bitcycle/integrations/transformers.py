"""Support for models and Trainer of Hugging Face transformers.

>>> from bitcycle.integrations.transformers import PrecisionCallback           # doctest: +SKIP
>>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PrecisionCallback("RTH")])    # doctest: +SKIP

`quantize_model` converts `Conv1D` (GPT-2), mixtures of experts (`experts.py`) and, if a model takes its attention function from
the library's registry, the two products of attention, q k^T and P v. The attention function "bitcycle" computes the library's
eager attention with quantized operands.

A converted model is saved with its original parameter names and with its conversion as `quantization_config` of method
"bitcycle" in its config.json. If this module is imported, `from_pretrained` restores the conversion and the saved bits.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, TrainerCallback
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.trainer_utils import has_length
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitcycle.files import read_object, write_json
from bitcycle.integrations import at_highest, bound_schedule, check_evaluate_at, experts
from bitcycle.integrations.feedback import LossFeed
from bitcycle.layer.control.controller import PrecisionController
from bitcycle.layer.conversion.by_function import ATTENTION_PRODUCTS
from bitcycle.layer.conversion.convert import quantize_model
from bitcycle.layer.products.block_product import Axes
from bitcycle.layer.products.quantized import CONVERSIONS, QuantizedLayer
from bitcycle.layer.products.quantized_product import penalty
from bitcycle.module.layers import MatrixProduct
from bitcycle.quantizer import QuantizerOptions, quantizer_options
from bitcycle.settings import SettingError

logger = logging.getLogger(__name__)

ATTENTION = "bitcycle"
STATE_FILE = "bitcycle.json"


class QuantizedConv1D(QuantizedLayer, Conv1D):
    """A quantized transformers Conv1D, a linear layer with a weight [in, out]: [..., in] -> [..., out]."""

    axes = Axes(-1, 0, 1)

    def rows_of(self, weight: Tensor) -> Tensor:
        return weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.quantized_product(x, _product)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight
    return y if bias is None else y + bias


CONVERSIONS[Conv1D] = QuantizedConv1D


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T s + bias + mask) v with quantized products: [N, heads, T, F] -> [N, T, heads, F]; and the softmax. With
    `softcap` c, c tanh(q k^T s / c) replaces q k^T s. Raises SettingError for attention sinks (`s_aux`)."""
    if s_aux is not None:
        problem, remedy = "has attention sinks, which the quantized attention lacks", "add *_product to float_layers"
        raise SettingError("model", type(module).__name__, problem, remedy)
    repeated = query.shape[1] // key.shape[1]
    if repeated > 1:  # grouped-query attention
        key, value = (x.repeat_interleave(repeated, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    products = [getattr(module, name, torch.matmul) for name in ATTENTION_PRODUCTS]
    scores = products[0](query, key.transpose(-2, -1)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    for added in (position_bias, attention_mask):
        scores = scores if added is None else scores + added
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(value.dtype), dropout, module.training)
    return products[1](weights, value).transpose(1, 2).contiguous(), weights


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def added_products(model: nn.Module) -> dict[str, nn.Module]:
    """Products to add to the model's attention layers and mixtures of experts, by their future names."""
    found = experts.added_products(model)
    for name, module in model.named_modules():
        if hasattr(module, ATTENTION_PRODUCTS[0]) or not _takes_attention_function(module):
            continue
        found |= {f"{name}.{product}".lstrip("."): MatrixProduct() for product in ATTENTION_PRODUCTS}
    return found


def _takes_attention_function(module: nn.Module) -> bool:
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def finish_conversion(model: nn.Module, conversion: dict[str, Any]) -> None:
    """Select the quantized functions of attention and experts, and record the conversion in the model's config."""
    experts.use_experts(model)
    outermost: str | None = None
    for name, module in model.named_modules():
        if hasattr(module, ATTENTION_PRODUCTS[0]) and hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
        if isinstance(module, PreTrainedModel) and (outermost is None or not name.startswith(outermost)):
            outermost = f"{name}." if name else ""
            own = [x.removeprefix(outermost) for x in conversion["float_layers"] if x.startswith(outermost)]
            module.config.quantization_config = SavedConversion(**{**conversion, "float_layers": own})
            if bits := conversion["quantizer"].get("layer_bits"):
                within = {x.removeprefix(outermost): value for x, value in bits.items() if x.startswith(outermost)}
                module.config.quantization_config.quantizer["layer_bits"] = within
            # keep parameter names: Trainer does not revert the library's renaming (huggingface/transformers issue
            # 48805)
            module._weight_conversions = []  # type: ignore[assignment]


@register_quantization_config(ATTENTION)
class SavedConversion(QuantizationConfigMixin):
    """Arguments of `quantize_model` in a model's config.json; float_layers are names."""

    def __init__(self, quantizer: dict[str, Any], float_layers: Sequence[str], **options: Any) -> None:
        self.quant_method: Any = ATTENTION
        self.quantizer, self.float_layers = dict(quantizer), list(float_layers)
        self.compute, self.recompute = options.get("compute", "simulate"), options.get("recompute", False)


@register_quantizer(ATTENTION)
class Reconversion(HfQuantizer):
    """Restores a saved converted model: loads the float network, converts it, and loads the remaining state."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        self.files = list(checkpoint_files or ())
        model._keys_to_ignore_on_load_unexpected = {r"_quantizer\.", r"precision\.bits$"}

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> None:
        self.remove_quantization_config(model)  # for transformers it is an ordinary model
        kind, saved_as = type(model).__name__, model.config.architectures or []
        if kind not in saved_as:
            problem = f"is not the class of the checkpoint, which is converted as {' or '.join(saved_as)}"
            remedy = "load it with that class; bitcycle.float_state_dict gives its float weights to others"
            raise SettingError("model", kind, problem, remedy)
        saved: Any = self.quantization_config
        options = type(quantizer_options(saved.quantizer["name"]))(**saved.quantizer)
        quantize_model(
            model, options, float_layers=saved.float_layers, compute=saved.compute, recompute=saved.recompute
        )
        state = {key: value for file in self.files for key, value in load_file(file).items()}
        if unknown := model.load_state_dict(state, strict=False).unexpected_keys:
            problem = f"does not fit its conversion: the model has no {', '.join(unknown[:3])}"
            raise SettingError("checkpoint", self.files, problem, "save it again with save_pretrained")
        model.eval()


class PrecisionCallback(TrainerCallback):
    """Trains with a schedule of `bitcycle` in transformers' Trainer; logs bits, cost and savings, and resumes exactly.

    Args:
        schedule: name of a schedule, whose length is set to that of the training, or a result of `bitcycle.schedule`.
        quantizer: name or options; the model is converted when the Trainer is created, unless already converted.
        hardware: name of the cost model.
        conversion: further arguments of `quantize_model`.
        evaluate_at: precision of forward passes in evaluation mode (evaluate, predict, generate), during training and after
            it: step (that of the last training step) or q_max.
        options: options of the schedule, such as q_min and q_max.

    Penalties of quantizers (PACT) are added to the loss of the model; a Trainer that computes another one is refused or, with
    compute_loss_func, warned about. Schedules that adapt to the loss (pfq) receive that of the model, up to a factor that is the
    same for all steps. Of multi-phase schedules, the bits alone are set. `control` is the PrecisionController.

    The trackers of `TrainingArguments(report_to=...)` are called before the Trainer's other callbacks, and do not receive
    what this one adds to the log. Use report_to=[], and list the tracker's callback after this one.
    """

    def __init__(
        self,
        schedule: Any = "RTH",
        quantizer: str | QuantizerOptions = "sbm",
        hardware: str = "bitops",
        conversion: dict[str, Any] | None = None,
        evaluate_at: str = "step",
        **options: Any,
    ) -> None:
        self.schedule, self.quantizer, self.hardware = schedule, quantizer, hardware
        self.conversion, self.options = conversion or {}, options
        self.control: PrecisionController | None = None
        self.evaluate_at, self._evaluation = check_evaluate_at(evaluate_at), ExitStack()
        self._hooks: list[RemovableHandle] = []
        self._terms = 1
        self._trains_penalty: bool | None = None
        """Whether a gradient has reached the penalty; None: there has been no penalty."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Convert the model before a checkpoint is loaded into it."""
        if not any(isinstance(module, QuantizedLayer) for module in model.modules()):
            quantize_model(model, self.quantizer, **self.conversion)
        self._watch_evaluations(model)

    def _watch_evaluations(self, model: nn.Module) -> None:
        if self.evaluate_at == "q_max":
            begin, end = self._begin_evaluation, self._end_evaluation
            self._hooks += [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
    ) -> None:
        is_converted = any(isinstance(module, QuantizedLayer) for module in model.modules())
        if not is_converted and quantizer_options(self.quantizer).name != "none":
            problem = "is not converted, as it or this callback came after the Trainer was created"
            remedy = "convert it in model_init by quantize_model, or give the callback to Trainer(callbacks=[...])"
            raise SettingError("model", type(model).__name__, problem, remedy)
        batches = len(train_dataloader) if has_length(train_dataloader) else math.inf
        epoch = batches / args.gradient_accumulation_steps
        bound = bound_schedule(self.schedule, self.options, state.max_steps, epoch)
        self.control = PrecisionController(model, bound, seed=args.seed, hardware=self.hardware)
        self._losses = LossFeed(bound, model)
        if state.global_step:
            saved = _saved_state(args, state.global_step)
            self.control.load_state_dict(saved)
            self._losses.load_state_dict(saved.get("losses", {}))
        for hook in self._hooks:  # of an earlier training, which may have been interrupted, or of evaluations before it
            hook.remove()
        # with num_items_in_batch, the Trainer adds up the losses of accumulated batches and of processes
        self._terms = args.gradient_accumulation_steps * (args.world_size if args.average_tokens_across_devices else 1)
        self._trains_penalty = None
        self._penalties = model.register_forward_hook(self._add_penalty, with_kwargs=True)
        self._hooks = [self._penalties]
        self._watch_evaluations(model)

    def _begin_evaluation(self, model: nn.Module, _inputs: Any) -> None:
        if not model.training:
            self._evaluation.enter_context(at_highest(self.control, model, self.schedule, self.options))

    def _end_evaluation(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        self._evaluation.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.control is not None
        self.control.step(state.global_step)

    def _add_penalty(self, model: nn.Module, _inputs: Any, keywords: dict[str, Any], output: Any) -> Any:
        """Add the penalties of the quantizers to the model's loss."""
        loss = output.get("loss") if hasattr(output, "get") else None
        if not model.training:
            return output
        added = penalty(model, loss)
        if loss is not None:
            self._losses.add(loss if added is None or not self._losses.takes_penalty else loss + added)
        if added is None:
            return output
        if added.requires_grad and not self._trains_penalty and not torch.compiler.is_compiling():
            self._trains_penalty = False
            added.register_hook(self._notice_gradient)
        if loss is not None:
            is_sum = keywords.get("num_items_in_batch") is not None
            output["loss"] = loss + (added / self._terms if is_sum else added)
        return output

    def _notice_gradient(self, _gradient: Tensor) -> None:
        self._trains_penalty = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._losses.end_step(state.global_step)
        if self._trains_penalty is not False:
            return
        problem = "the Trainer computes its loss from the model's outputs, without the penalty of the quantizer"
        if args.label_smoothing_factor:
            remedy = "use 0, and smooth the labels in the model's own loss"
            raise SettingError("label_smoothing_factor", args.label_smoothing_factor, problem, remedy)
        self._trains_penalty = True  # noticed once
        logger.warning("%s: add bitcycle.layer.penalty(model) in compute_loss_func, unless it does so", problem)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or self.control is None or self.control.precision is None:
            return
        cost = self.control.cost()
        values: dict[str, Any] = {f"bits_{role}": bits for role, bits in self.control.precision._asdict().items()}
        values |= {"gbitops": cost.gbitops, "cost_relative_to_static": cost.relative_to_static}
        logs |= values
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1] |= values  # the trainer fills it before this event

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.control is not None and args.should_save:
            folder = _checkpoint_folder(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / STATE_FILE, {**self.control.state_dict(), "losses": self._losses.state_dict()})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._penalties.remove()


def _checkpoint_folder(args: Any, state: Any) -> Path:
    """The folder of the checkpoint that the Trainer has just saved; a search of hyperparameters has a folder for each trial,
    whose name callbacks are not told."""
    name = f"checkpoint-{state.global_step}"
    trials = Path(args.output_dir).glob(f"*/{name}") if state.is_hyper_param_search else ()
    return max(trials, key=lambda folder: folder.stat().st_mtime_ns, default=Path(args.output_dir, name))


def _saved_state(args: Any, step: int) -> dict[str, Any]:
    """The state of the resumed checkpoint, whose folder the Trainer does not tell callbacks. Raises SettingError without one."""
    given = args.resume_from_checkpoint  # True: the last one in output_dir
    folder = Path(given) if given and given is not True else Path(args.output_dir, f"checkpoint-{step}")
    saved = read_object(folder / STATE_FILE)
    if saved.get("next_step") != step:
        problem = f"has no {STATE_FILE} with the cost and the schedule of step {step}"
        remedy = (
            "if the resumed checkpoint lies outside output_dir, give TrainingArguments(resume_from_checkpoint=...) too"
        )
        raise SettingError("resume_from_checkpoint", folder, problem, remedy)
    return saved
