"""One row for each schedule and each quantizer: what the resume test runs, so that a new one is covered unasked."""

from __future__ import annotations

from bitcycle.quantizer import QUANTIZERS
from bitcycle.schedule import SCHEDULES
from tests.made_data import GRAPHS, IMAGES, PAIRS, RATINGS, SPEECH, TEXT, VOC, WEIGHTS

QUICK_STAGES = ["schedule.epoch_steps=2", "schedule.epsilon=0.5", "schedule.alpha=1"]
CHOOSING = [
    *("quantizer=uniform_l2", "training.evaluation_steps=5", "schedule.candidates=3", "schedule.alpha=0.1"),
    "schedule.later_length=1",
]
OPTIONS = {
    "pfq": QUICK_STAGES,
    "fractrain": QUICK_STAGES,
    "hlhlp": CHOOSING,
    "hlhlhlp": [*CHOOSING, "schedule.ratio=40"],
    "fine_tuning": CHOOSING,
    "partial_pretrain": ["model=resnet8_extra_skip", "quantizer=pact_binary", "training.evaluation_steps=10"],
    "range_test": ["training.steps=40", "schedule.level_steps=6", "schedule.window=2", "schedule.stop=false"],
}
"""Options that let a schedule show what it does in a smoke run."""

SHORT = ["training.steps=24", "training.evaluation_steps=8"]
"""Long enough for three precisions of each cycle, and for two stages of fractrain."""

FEWER_CYCLES = {key: ["schedule.cycles=4"] for key in ("cosine_anneal", "triangular", "gradient_cycle", "delayed")}
"""For schedules that have 32 cycles unless told otherwise."""

FLOAT_THEN_LOW = ["schedule=deficit", "schedule.q_max=32", "schedule.start=0.3", "schedule.end=0.7"]
"""float32, then few bits with float gradients, then float32 again; schedule.q_min says how few."""

QUANTIZER_SCHEDULES: dict[str, list[str]] = {
    "wageubn": ["schedule=CR", "schedule.q_min=6"],
    "pact_binary": [*FLOAT_THEN_LOW, "schedule.q_min=1"],
    "uniform_l2": [
        "schedule=LR",
        "schedule.q_min=2",
        "schedule.q_max=3",
        "schedule.cycles=4",
        "schedule.gradient_min=32",
    ],
    "ternary": [*FLOAT_THEN_LOW, "schedule.q_min=2"],
    "multibit": [*FLOAT_THEN_LOW, "schedule.q_min=2"],
    "ttq": [*FLOAT_THEN_LOW, "schedule.q_min=2"],
    "mx": ["schedule=RTH", "schedule.q_min=4"],
    "nvfp4": ["schedule=deficit", "schedule.q_max=32", "schedule.q_min=4", "schedule.start=0.3", "schedule.end=0.7"],
    "nvfp4_pretraining": ["schedule=late_switch", "schedule.share=0.3"],
    "mxfp4_backward": ["schedule=mxfp4_backward"],
    "fp8": ["schedule=static"],
}
"""Quantizer -> a schedule within the bits that it offers; CR for the others."""

SMALL_TEXT = [
    *("dataset=text", f"dataset.path={TEXT}", "task.sequence_length=6", "dataset.train_samples=20"),
    *("dataset.test_samples=5", "training.batch_size=4", "training.steps=40"),
]

SPEECH_RUN = [
    *("dataset=speech_manifest", f"data_root={SPEECH}", "dataset.sampling_rate=8000", "dataset.nominal_seconds=0.1"),
    *("model=speech_lstm", "model.hidden=8", "model.layers=2", "dataset.train_samples=20", "dataset.test_samples=6"),
    *("training.batch_size=8", "training.steps=12", "training.evaluation_steps=2", "training.log_steps=3"),
]
"""A run on these that lasts seconds."""

GRAPH = ["dataset=cora", f"data_root={GRAPHS}", "model.hidden=8", "training.steps=20", "training.evaluation_steps=6"]

DETECTION = [
    *("dataset=voc_small", "model=retinanet", "model.width=8", f"data_root={VOC}", "schedule.cycles=2"),
    *("dataset.shorter_side=48", "dataset.longer_side=64", "dataset.flip=true", "dataset.workers=0"),
    *("dataset.train_samples=5", "dataset.test_samples=2", "task.score_threshold=0.01"),
    *("training.batch_size=2", "training.steps=6", "training.evaluation_steps=3", "training.optimizer.name=sgd"),
]

ENTAILMENT = [
    *("dataset=sentence_pairs", "model=bert_tiny", "model.hidden=16", "model.intermediate=32"),
    *(f"dataset.path={PAIRS}", "dataset.length=12", "dataset.vocabulary=120", *SHORT),
]

RECOMMENDATION = [
    *("dataset=ratings", "model=ncf", f"dataset.path={RATINGS}", "dataset.test_samples=20", "dataset.validation=0.5"),
    *("dataset.train_samples=50", *SHORT),
]

BLOCKS = [
    *(*SMALL_TEXT, "task=language_modelling_blocks", "model=transformer"),
    *("model.width=16", "model.heads=2", "model.feedforward=16", "model.layers=1"),
]

TASKS: dict[str, list[str]] = {
    "classification": ["training.batch_size=8"],
    "language_modelling": [*SMALL_TEXT, "model=lstm2", "model.hidden=8"],
    "language_modelling_blocks": BLOCKS,
    "node_classification": [*GRAPH, "model=gcn_small"],
    "detection": DETECTION,
    "entailment": ENTAILMENT,
    "recommendation": RECOMMENDATION,
    "speech_recognition": SPEECH_RUN,
}
"""Task -> a small run of it, without schedule and quantizer."""

SMALL_IMAGES = {
    "dataset.train_samples": "128",
    "dataset.test_samples": "32",
    "training.batch_size": "8",
    "training.steps": "24",
    "training.evaluation_steps": "8",
}
"""What a run on the digits has in the resume test unless its row says otherwise: 16 steps an epoch."""

FOUR_PHASES = [*CHOOSING, "training.steps=32"]

SLOW = {
    *("schedule=CT", "schedule=LR", "schedule=LT", "schedule=RR", "schedule=RTV", "schedule=ER", "schedule=ETV"),
    *("schedule=CR", "schedule=RTH", "schedule=triangular", "schedule=cosine_anneal", "schedule=gradient_cycle"),
    *("schedule=deficit", "schedule=fine_tuning", "schedule=dfq", "schedule=static", "schedule=delayed"),
    *("schedule=pfq_manual", "schedule=late_switch", "schedule=mxfp4_backward", "quantizer=ternary"),
    *("quantizer=nvfp4", "quantizer=mxfp4_backward"),
    *(
        "schedule=ETH",
        "schedule=hlhlhlp",
        "weight averaging in phases",
        "compute=codes with gates",
        "weight averaging with gates",
        "schedule=dfq on mobilenet_v2",
    ),
}
"""Rows whose code another row goes through too: left to `make test-all`."""

RESUME: dict[str, list[str]] = {
    **{
        f"schedule={name}": [f"schedule={name}", *OPTIONS.get(name, [*SHORT, *FEWER_CYCLES.get(name, [])])]
        for name in SCHEDULES
    },
    **{
        f"schedule={name}": [f"schedule={name}", *OPTIONS[name], "training.steps=32"]
        for name in ("hlhlp", "hlhlhlp", "fine_tuning")
    },
    "schedule=dfq": ["schedule=dfq", *SHORT],
    "schedule=fractrain": ["schedule=fractrain", *QUICK_STAGES, *SHORT],
    **{
        f"quantizer={name}": [f"quantizer={name}", *QUANTIZER_SCHEDULES.get(name, ["schedule=CR"]), *SHORT]
        for name in QUANTIZERS
    },
    "compute=codes": ["training.compute=codes", "training.recompute=true", "schedule=CR", "schedule.q_max=10"],
    "compute=codes with gates": ["training.compute=codes", "schedule=dfq", *SHORT],
    "model=mobilenet_v2": [
        *("model=mobilenet_v2", "schedule=RTH", "quantizer.depthwise_bits=[8,16]", "training.batch_size=4"),
        *("training.steps=8", "training.evaluation_steps=4"),
    ],
    "hlhlp with adam": [
        *(
            "schedule=hlhlp",
            *FOUR_PHASES,
            "schedule.ratio=10",
        ),
        *(
            "schedule.activation_bits=[32,2,8,2]",
            "training.optimizer.name=adam",
            "training.learning_rate.initial=0.001",
        ),
    ],
    "schedule=dfq on mobilenet_v2": [
        "schedule=dfq",
        "model=mobilenet_v2",
        "training.steps=12",
        "training.batch_size=4",
        "dataset.test_samples=32",
    ],
    "schedule=dfq remasked": [
        "schedule=dfq",
        "schedule.remask_gradient=true",
        *SHORT,
    ],
    "schedule=dfq, chosen backward passes": ["schedule=dfq", "schedule.backward=chosen", *SHORT],
    "optimizer=adam": ["training.optimizer.name=adam", "training.learning_rate.initial=0.001"],
    "optimizer=nesterov": ["training.optimizer.nesterov=true", "training.learning_rate.name=cosine"],
    "q_min=auto": ["training.steps=64", "schedule=RTH", "schedule.q_min=auto", "schedule.range_test.threshold=1"],
    "learning_rate=plateau": [
        *("training.learning_rate.name=plateau", "training.evaluation_steps=4", "training.learning_rate.initial=0.5"),
        *("dataset.validation=0.1", "schedule=CR"),
    ],
    "optimizer=adamw": ["training.optimizer.name=adamw", "training.clip_norm=0.5", "training.evaluation_steps=null"],
    "learning_rate=cyclic": ["training.learning_rate.name=cyclic"],
    "weight averaging": [
        *("schedule=CR", "quantizer=uniform_l2", "schedule.gradient_min=32", "schedule.q_min=2"),
        *("dataset.train_samples=32", "training.steps=16", "training.evaluation_steps=8", "schedule.cycles=2"),
        "schedule.q_max=3",
        *("training.weight_averaging.start=0.3", "training.weight_averaging.every=0.25"),
    ],
    "weight averaging in phases": [
        *("schedule=hlhlp", *FOUR_PHASES),
        *("training.weight_averaging.start=0.3", "training.weight_averaging.every=0.1"),
    ],
    "weight averaging with gates": [
        *("schedule=dfq", *SHORT, "training.weight_averaging.start=0.3", "training.weight_averaging.every=0.25"),
    ],
    "initial weights": ["schedule=CR", "dataset.part=second_samples", f"model.initial_weights={WEIGHTS}"],
    "augmentation": ["dataset.crop_padding=2", "dataset.flip=true", "schedule=ER"],
    "dataset=voc_small": [*DETECTION, "schedule=CR", "training.evaluation_steps=6"],
    "streamed images": [
        *("dataset=image_folder", f"dataset.path={IMAGES}", "dataset.memory_gib=0", "dataset.random_crop=true"),
        *("dataset.train_samples=40", "dataset.test_samples=8", "training.batch_size=8", "dataset.workers=0"),
        *("schedule=ER", "schedule.cycles=2"),
    ],
    "language_modelling": [
        *SMALL_TEXT,
        *("model=lstm2", "model.hidden=8", "schedule=RTH", "training.evaluation_steps=null"),
    ],
    "language_modelling awd": [
        *(*SMALL_TEXT, "model=lstm_awd", "model.hidden=8", "model.embedding=6", "schedule=CR", "training=awd"),
        *("task.lengths=drawn", "training.learning_rate.initial=8", "training.weight_averaging.patience=1"),
        *("training.epochs=null", "training.evaluation_steps=4"),
    ],
    "language_modelling hlhlp": [
        *(
            *SMALL_TEXT,
            "model=gru_hlhlp",
            "model.hidden=8",
            "task.loss=time_sum",
            "schedule=hlhlp",
            *CHOOSING,
            "schedule.ratio=10",
        ),
        *("schedule.activation_bits=[32,2,8,2]", "training.learning_rate.initial=0.1"),
    ],
    "speech": [*SPEECH_RUN, "schedule=CR", "schedule.cycles=2", "training.learning_rate.patience=1"],
    "speech hlhlp": [
        *(*SPEECH_RUN, "schedule=hlhlp", "quantizer=uniform_l2", "schedule.candidates=2", "schedule.alpha=0.1"),
        "model.stack=2",
    ],
    "task=entailment": [*ENTAILMENT, "schedule=RTH"],
    "task=recommendation": [*RECOMMENDATION, "schedule=partial_pretrain", "quantizer=pact_binary"],
    "node_classification": [
        *GRAPH,
        "model=gcn_small",
        "model.aggregation=quantized",
        "model.norm=tensor",
        "schedule=CR",
    ],
    "node_classification with sampled neighbours": [
        *(*GRAPH, "model=graphsage", "dataset.neighbours=[3,2]", "dataset.self_loops=false", "training.batch_size=16"),
        *("schedule=RTH", "training.evaluation_steps=null"),
    ],
    "language_modelling_blocks": [*BLOCKS, "schedule=CR"],
}
"""Name of the case -> overrides of a smoke run, on the digits unless said otherwise; made_data.py makes other data."""


def run_of(case: str) -> list[str]:
    """The overrides of a case, each setting once."""
    row = dict(override.partition("=")[::2] for override in RESUME[case])
    return [f"{key}={value}" for key, value in (row if "dataset" in row else SMALL_IMAGES | row).items()]
