"""Opens a head's checkpoint, recognises its kind, and refuses keys and tensors that have no meaning here.

Heads of one kind come in several layouts that differ in a norm, a residual or the meaning of a layer id. A switch that
is read wrongly costs acceptance and nothing else shows it, so every tensor and every key must be accounted for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specdec.checkpoints import Checkpoint, canonical_names, locate
from specdec.checkpoints.locate import entries, listed
from specdec.errors import CheckpointError, nearest, shown
from specdec.models.fields import Fields, wrong
from specdec.models.read_keys import HARMLESS, ReadKeys

DEMO = "demo"
EAGLE, P_EAGLE, DFLASH, DSPARK, MTP = "eagle3", "p_eagle", "dflash", "dspark", "mtp"
KINDS = (EAGLE, P_EAGLE, DFLASH, DSPARK)
LAYER_TABLE = "transformer_layer_config"
_NESTED = ("eagle_config", "dflash_config")  # tables whose keys mean what they mean at the top
_OTHER_HEAD = "a head of one of the kinds " + ", ".join(KINDS)
SAME_HEAD = "config.json and weights of one and the same head"

_SPECULATORS = {"eagle3": EAGLE, "peagle": P_EAGLE, "dflash": DFLASH, "dspark": DSPARK, "mtp": MTP}
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": EAGLE,
    "Eagle3LlamaForCausalLM": EAGLE,
    "DFlashDraftModel": DFLASH,
    "Qwen3DSparkModel": DSPARK,
}
# What a tensor's name begins with, in the order of precedence.
_KIND_BY_TENSOR = (
    ("markov_head.", DSPARK),
    ("mtp.", MTP),
    ("mtp_layers.", MTP),
    ("mask_hidden", P_EAGLE),
    ("layers.0.hidden_norm.weight", EAGLE),
    ("hidden_norm.weight", DFLASH),
    ("encoder.output_norm_enc.weight", DFLASH),
)
# Kinds that are not supported, whose tensors may look like those of one that is, by a part of what configs call them.
_UNSUPPORTED = {
    "dflash2": "DFlash2",
    "domino": "Domino",
    "Eagle3DeepseekV2ForCausalLM": "Latent-attention (MLA) EAGLE-3",
    "Gemma4DSparkModel": "Sandwich-norm (Gemma) DSpark",
    "MLPSpeculator": "MLP speculator",
    "hydra_num_heads": "Hydra",
    "lilicorr": "LiLiCorr",
    "MedusaModel": "Medusa",
    "medusa_num_heads": "Medusa",
    "xpress": "XPress",
}

_MASK_ROW = "mask_embedding.pt"
_TRAINING_ONLY = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
# Switches of which only these values are supported.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
    "has_lm_head": (True, False),
    "attention_value_scale": (1,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
}


class HeadFiles:
    """An open checkpoint of a head.

    Attributes:
        names: stored names of its tensors, by canonical name.
        config: the keys at the top and those of the kind's own table.
        layers: the table with the layers' sizes; the config itself outside speculators' layout.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        names = canonical_names(checkpoint.tensors)
        self.names = names | {name: name for name in names.ignored}  # no head has a vision tower
        keys = dict(checkpoint.config)
        self._paths: dict[str, str] = {}
        for table in _NESTED:
            for key, value in _table(table, keys.pop(table, None)).items():
                if value is not None and keys.get(key) not in (None, value):
                    raise CheckpointError(
                        f"config.json: {key!r} is given twice, as {shown(keys[key])} and {shown(value)}",
                        folder=checkpoint.path,
                    )
                if keys.get(key) is None:
                    keys[key], self._paths[key] = value, f"{table}.{key}"
        self.config = self.layers = ReadKeys(keys)

    @classmethod
    def open(cls, model: str, revision: str | None = None, *, kind: str = EAGLE) -> HeadFiles:
        """The head in a folder, or of a hub id, or the embedded model's ("demo") of this ``kind``.

        Raises: CheckpointError as ``locate`` and ``Checkpoint.open``.
        """
        folder = locate(model, revision=revision) / (kind if model == DEMO else "")
        if model == DEMO and not (folder / "config.json").is_file():
            raise CheckpointError(f"the embedded model has no {kind} head", try_="drafter.model with a head's folder")
        if _MASK_ROW in entries(folder):
            raise CheckpointError(
                f"{folder} has {_MASK_ROW} beside the weights, a trained embedding of the mask token, which is not "
                "supported; a pickle is never opened",
                try_=f"a copy without {_MASK_ROW}, if the head was trained with the target's embedding of that token",
            )
        return cls(Checkpoint.open(folder))

    # --- tensors ------------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str, axes: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor. Raises: CheckpointError if it is missing, or has not so many ``axes``."""
        if name not in self.names:
            raise CheckpointError(
                f"the tensor {name} is missing", folder=self.checkpoint.path, nearest=nearest(name, self.names)
            )
        shape = self.checkpoint.tensors[self.names[name]].shape
        if axes is not None and len(shape) != axes:
            raise CheckpointError(
                f"the tensor {self.names[name]} has the shape {list(shape)}, and takes {axes} axes",
                folder=self.checkpoint.path,
            )
        return shape

    def first(self, *names: str) -> str:
        """The first of these tensors that is there, or the first name."""
        return next((name for name in names if name in self), names[0])

    def refuse_unused_tensors(self, used: Iterable[str]) -> None:
        """Raises: CheckpointError for a tensor that the head was trained with and nothing here computes with."""
        known = {*used, *_TRAINING_ONLY, "d2t"}
        unused = [name for name in self.names if name not in known]
        if unused:
            raise CheckpointError(
                f"the tensor {self.names[unused[0]]} {list(self.shape(unused[0]))} is not used by this head",
                also=listed(unused[1:]) or None,
                folder=self.checkpoint.path,
                try_=_OTHER_HEAD,
            )

    # --- the config ---------------------------------------------------------------------------------------------------

    def path(self, key: str) -> str:
        """Where the value of a key is: ``eagle_config.layer_ids``."""
        return self._paths.get(key, key)

    def read_layers(self, defaults: Mapping[str, Any]) -> None:
        """Take ``layers`` from speculators' table. Raises: CheckpointError if it is no table."""
        self.layers = ReadKeys({**defaults, **_table(LAYER_TABLE, self.config[LAYER_TABLE])})

    def flag(self, key: str, *tensors: str) -> bool | None:
        """A flag, which says the same as the presence of one of ``tensors``; None if neither says anything.

        Raises: CheckpointError for a value that is no flag, or that contradicts the tensors.
        """
        value = self.config.get(key)
        if value is not None:
            Fields({key: value}).flag(key)
        if not tensors:
            return value
        tensor = self.first(*tensors)
        present = tensor in self
        if value not in (None, present):
            raise CheckpointError(
                f"config.json: {key!r} is {shown(value)}, and the tensor {tensor} is "
                f"{'there' if present else 'missing'}",
                try_=SAME_HEAD,
            )
        return present

    def refuse_unread_keys(self) -> None:
        """Raises: CheckpointError for a key that may change what the head computes and that nothing here reads."""
        for table, prefix in ((self.config, ""), (self.layers, f"{LAYER_TABLE}.")):
            for key in table.unread:
                path = prefix + key if prefix else self.path(key)
                if key in _SUPPORTED and table[key] not in _SUPPORTED[key]:
                    raise CheckpointError(
                        f"config.json: {path} = {shown(table[key])} is not supported; {shown(_SUPPORTED[key][0])} is"
                    )
                if key not in HARMLESS and key not in _SUPPORTED and not key.startswith("_"):
                    raise CheckpointError(
                        f"config.json: unknown key {path}; it may change the head's output",
                        value=shown(table[key]),
                        try_="a config.json without it, if it changes nothing that the head computes",
                    )


def _table(key: str, value: object) -> Mapping[str, Any]:
    """A table of the config; empty for None. Raises: CheckpointError if it is no table."""
    if value is not None and not isinstance(value, Mapping):
        raise wrong(key, "an object", value)
    return value or {}


def optional_count(table: Mapping[str, Any], key: str) -> int | None:
    """A whole number from 1, or None if the key is absent. Raises: CheckpointError for anything else."""
    return None if table.get(key) is None else Fields(table).whole(key)


# --- the kind ---------------------------------------------------------------------------------------------------------


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a draft head and to no model, as far as the config shows."""
    marks = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config")
    known = any(key in config for key in marks) or any(word in _ARCHITECTURES for word in architectures(config))
    return known or _unsupported(config) is not None


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names under ``architectures``."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def kind_of(files: HeadFiles) -> str:
    """The kind of a head, by its tensors; by its config where a tensor that decides is missing.

    Raises: CheckpointError for a kind that is known and not supported, tensors of no known kind, or a config that
        says another kind than the tensors.
    """
    names, config = files.names, files.config
    if refused := _unsupported(config):
        raise CheckpointError(f"{refused} heads are not supported", folder=files.checkpoint.path, try_=_OTHER_HEAD)
    said = config.get("speculators_model_type")
    if said is not None and (not isinstance(said, str) or said not in _SPECULATORS):
        raise CheckpointError(f"config.json: 'speculators_model_type' = {shown(said)} is not supported")
    declared = _SPECULATORS.get(said) if said is not None else None
    declared = declared or next((_ARCHITECTURES[w] for w in architectures(config) if w in _ARCHITECTURES), None)
    by_tensor, tensor = next(
        ((kind, name) for start, kind in _KIND_BY_TENSOR for name in names if name.startswith(start)), (None, "")
    )
    if by_tensor == EAGLE and declared == P_EAGLE:
        raise CheckpointError("the tensor mask_hidden is missing, which a P-EAGLE head has")
    if declared == EAGLE and by_tensor == P_EAGLE and said is None:  # both have one name in these layouts
        declared = P_EAGLE
    if by_tensor is not None and declared not in (None, by_tensor):
        raise CheckpointError(
            f"the tensor {names[tensor]} belongs to a head of the kind {by_tensor!r}, config.json says {declared!r}",
            try_=SAME_HEAD,
        )
    kind = by_tensor or declared
    if kind == MTP:
        raise CheckpointError(
            "this is a multi-token-prediction (MTP) head in speculators' layout, which is read with its target",
            folder=files.checkpoint.path,
            try_='target.mtp with this folder and drafter.name = "mtp"; specdec info MODEL --mtp FOLDER describes it',
        )
    if kind is None:
        raise CheckpointError(
            f"{files.checkpoint.path} is no draft head of a known kind",
            model_type=config.get("model_type"),
            architectures=listed(architectures(config)) or None,
            tensors=listed(names),
            try_=_OTHER_HEAD,
        )
    return kind


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """What a config calls a head of a kind that is not supported; None for others."""
    called = [config.get("speculators_model_type"), config.get("projector_type"), *architectures(config), *config]
    words = [word for word in called if isinstance(word, str)]
    return next((kind for part, kind in _UNSUPPORTED.items() if any(part in word for word in words)), None)
