"""Find out what a head's checkpoint is: its kind by its tensors, its switches by tensors first and config second.

Heads of one kind come in several layouts that differ in a norm, a residual or the meaning of a layer id. A switch that
is read wrongly costs acceptance and nothing else shows it, so every tensor and every key must be accounted for: one
that is present and has no meaning here is an error. Where the tools that train heads disagree about a default, the one
that writes this layout decides, and ``Layout.rules`` says which rule was taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from specdec.backends.ops import Rope
from specdec.checkpoints import Checkpoint, canonical_name, locate
from specdec.checkpoints.locate import entries, listed
from specdec.contract import ModelInfo, Needs
from specdec.errors import CheckpointError, UnsupportedError, nearest, shown
from specdec.models.fields import MOST_LAYERS, Fields
from specdec.models.read_keys import ReadKeys

DEMO = "demo"
EAGLE, P_EAGLE, DFLASH, DSPARK, MTP = "eagle3", "p_eagle", "dflash", "dspark", "mtp"
KINDS = (EAGLE, P_EAGLE, DFLASH, DSPARK)
_SPECULATORS = {"eagle3": EAGLE, "peagle": P_EAGLE, "dflash": DFLASH, "dspark": DSPARK, "mtp": MTP}
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": EAGLE,
    "Eagle3LlamaForCausalLM": EAGLE,
    "DFlashDraftModel": DFLASH,
    "Qwen3DSparkModel": DSPARK,
}
# Kinds that are known and not computed: a part of a tensor's name, and what such a head is called.
_REFUSED_TENSORS = (
    ("attention_conv.", "DFlash2"),
    ("candidate_selector.", "DFlash2"),
    ("prefix_gru.", "Domino"),
    ("embed_proj.", "Domino"),
    ("aux_hidden_norms.", "Laguna"),
    (".g_proj.", "Laguna"),
    (".kv_a_proj_with_mqa.", "EAGLE-3 with latent attention (MLA)"),
    ("medusa_head.", "Medusa"),
    (".pre_feedforward_layernorm.", "DSpark with Gemma's sandwich norms"),
    ("jacobi_mixer.", "XPress"),
    ("transition_scorer.", "LiLiCorr"),
)
_REFUSED_NAMES = {
    "dflash2": "DFlash2",
    "xpress": "XPress",
    "lilicorr": "LiLiCorr",
    "domino": "Domino",
    "Eagle3DeepseekV2ForCausalLM": "EAGLE-3 with latent attention (MLA)",
    "Gemma4DSparkModel": "DSpark with Gemma's sandwich norms",
    "MedusaModel": "Medusa",
}
_MEDUSA = re.compile(r"\d+\.\d+\.(linear\.)?(weight|bias)")
_TRAINING_ONLY = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
# Keys that every config may carry and that change nothing a head computes.
_HARMLESS = frozenset(
    """_name_or_path name_or_path architectures auto_map attn_implementation _attn_implementation attention_dropout
    begin_suppress_tokens bad_words_ids bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping embed_requires_grad
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id has_no_defaults_at_init id2label initializer_range label2id length_penalty max_length
    max_position_embeddings max_window_layers min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    speculators_version suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache""".split()
)
# What speculators leaves out of a config because it equals the class's default.
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
    },
}


@attrs.frozen(kw_only=True)
class Geometry:
    """Sizes of a head's decoder layers."""

    hidden: int  # H_d
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    scale: float  # of attention scores
    layers: int
    windows: tuple[int | None, ...]  # of each layer; None: full attention


@attrs.frozen(kw_only=True)
class States:
    """Which hidden states of the target a head reads.

    Attributes:
        ids: as the config has them; None if it has none, and the default for this many states holds.
        count: of states; the fully connected layer joins them in ascending order.
        shift: what turns an id into a boundary: 0 for boundaries, 1 for layers, whose output they name.
        final: whether the output of the target's last layer means the state after the final norm.
    """

    ids: tuple[int, ...] | None
    count: int
    shift: int
    final: bool = False

    def of(self, layers: int) -> tuple[tuple[int, ...], bool]:
        """The boundaries of a target with ``layers`` layers, and whether the state after the final norm follows.

        Raises: UnsupportedError for boundaries that this target has not.
        """
        ids = (2, layers // 2, layers - 3) if self.ids is None else tuple(i + self.shift for i in self.ids)
        found = sorted(set(ids))
        outside = [k for k in found if not 0 <= k <= layers]
        if outside or len(found) != self.count:
            raise UnsupportedError(
                f"the head reads {self.count} states, at the layer boundaries {list(ids)}, and this target has the "
                f"boundaries 0 to {layers}",
                reason="it was trained for another target",
            )
        if self.final and found[-1:] == [layers]:
            return tuple(found[:-1]), True
        return tuple(found), False


@attrs.frozen(kw_only=True)
class Layout:
    """What a head's checkpoint is and which of the layouts' switches it has.

    Attributes:
        kind: one of ``KINDS``.
        source: which tool's layout it is: "speculators", "SpecForge", "EAGLE", "z-lab" or "DeepSpec".
        states: the target's hidden states that it reads; None: only the state after the final norm, and no fc.
        target_hidden: H_t, from the width of ``fc``.
        target_vocab, draft_vocab: V and V_d.
        tokens: the target's id of every draft id, ascending; None if the vocabularies are one.
        order: draft ids in the order of ``tokens``.
        own_embedding, own_head: whether the files hold them.
        norm_before_residual: the residual is the normed state.
        norm_output: a chained step starts from the output of the final norm.
        logit_scale: of the logits.
        mask_token: the token of masked rows.
        block_size: rows of a block.
        from_anchor: the anchor's row gives a draft too.
        bidirectional: for each layer, whether the rows of a block see those after them.
        window_from_anchor: windows count from the first row of the block, else from each row.
        scaled_embedding: embedded tokens carry the target's embedding scale.
        markov: the kind of a DSpark head's sequential part, and its rank.
        confidence: a DSpark head predicts acceptance, from the state and (``confidence_joined``) the last token.
        depth: drafts per cycle that it was trained for; None if the config does not say.
        target: the model that it was trained for; "" if the config does not say.
        rules: facts for ``specdec info``: what was read and, where tools disagree, which rule was taken.
    """

    kind: str
    source: str
    geometry: Geometry
    states: States | None
    target_hidden: int
    target_layers: int | None = None
    target_vocab: int | None
    draft_vocab: int
    tokens: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()
    own_embedding: bool
    own_head: bool
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    mask_token: int | None = None
    block_size: int = 0
    from_anchor: bool = False
    bidirectional: tuple[bool, ...] = ()
    window_from_anchor: bool = False
    scaled_embedding: bool = False
    markov: str = ""
    markov_rank: int = 0
    confidence: bool = False
    confidence_joined: bool = False
    depth: int | None = None
    target: str = ""
    rules: tuple[tuple[str, str], ...] = ()

    def needs(self, info: ModelInfo) -> Needs:
        """The hidden states that a target must give. Raises: UnsupportedError if it has not got them."""
        if self.states is None:
            return Needs(final_hidden=True)
        boundaries, final = self.states.of(info.layers)
        return Needs(boundaries=boundaries, final_hidden=final)

    def check_target(self, info: ModelInfo) -> None:
        """Refuse a head for another target. Raises: UnsupportedError with both figures."""
        if not info.layers and not info.gives_hidden:
            raise UnsupportedError(
                f"a head reads the target's hidden states, and {info.family} gives them to no drafter"
            )
        for what, own, theirs in (
            ("hidden size", self.target_hidden, info.hidden_size),
            ("vocabulary", self.target_vocab, info.vocab_size),
            ("number of layers", self.target_layers, info.layers),
        ):
            if own is not None and own != theirs:
                raise UnsupportedError(
                    f"the head was trained for another target: its {what} is {own}, this target's is {theirs}",
                    trained_for=self.target or None,
                    try_="a head of this target, or the target that it was trained for",
                )
        self.needs(info)


class HeadFiles:
    """An open checkpoint of a head, its tensors by canonical name, and the config with the keys that were read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.names = {canonical_name(name).replace("midlayer.", "layers.0."): name for name in checkpoint.names}
        self.config = ReadKeys(checkpoint.config)
        self.tables: list[tuple[str, ReadKeys]] = [("", self.config)]

    @classmethod
    def open(cls, model: str, revision: str | None = None, *, kind: str = EAGLE) -> HeadFiles:
        """The head in a folder, or of a hub id, or the embedded model's ("demo") of this ``kind``.

        Raises: CheckpointError as ``locate``, and for pickled weights.
        """
        folder = locate(model, revision=revision) if model != DEMO else locate(DEMO) / kind
        if model == DEMO and not (folder / "config.json").is_file():
            raise CheckpointError(
                f"the embedded model has no head of the kind {kind!r}", try_="drafter.model with a head's folder"
            )
        files = entries(folder)
        pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickles and not any(name.endswith(".safetensors") for name in files):
            raise CheckpointError(
                f"{folder} has its weights in the pickle {pickles[0]}, which is never opened",
                try_='a converted copy: python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous()'
                f" for k, v in torch.load('{pickles[0]}', weights_only=True).items()}}, 'model.safetensors')\"",
            )
        return cls(Checkpoint.open(folder))

    @property
    def file(self) -> Path:
        """The head's config.json, for messages."""
        return self.checkpoint.path / "config.json"

    def table(self, key: str, defaults: Mapping[str, Any] | None = None) -> ReadKeys:
        """A table of the config; empty if there is none. Raises: CheckpointError if it is no table."""
        given = self.config.get(key)
        if given is not None and not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: {key!r} takes an object, got {shown(given)}", file=self.file)
        made = ReadKeys({**(defaults or {}), **(given or {})})
        self.tables.append((f"{key}.", made))
        return made

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str, axes: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor. Raises: CheckpointError if it is missing, or has not so many ``axes``."""
        if name not in self.names:
            raise CheckpointError(
                f"the tensor {name} is missing", folder=self.checkpoint.path, nearest=nearest(name, self.names)
            )
        shape = self.checkpoint.shape(self.names[name])
        if axes is not None and len(shape) != axes:
            raise CheckpointError(
                f"the tensor {self.names[name]} has the shape {list(shape)}, and takes {axes} axes",
                folder=self.checkpoint.path,
            )
        return shape

    def refuse_unread_keys(self) -> None:
        """Raises: CheckpointError for a key that has no meaning here: it may change what the head computes."""
        for path, table in self.tables:
            for key in table.unread:
                if key not in _HARMLESS:
                    raise CheckpointError(
                        f"config.json: {path}{key} = {shown(table[key])} is a key that no rule here reads",
                        file=self.file,
                        try_="a config.json without it, if it changes nothing that the head computes",
                    )

    def refuse_unused_tensors(self, used: Iterable[str]) -> None:
        """Raises: CheckpointError for a tensor that the head was trained with and nothing here computes with."""
        known = {*used, *_TRAINING_ONLY, "d2t"}
        left = [name for name in self.names if name not in known]
        if left:
            raise CheckpointError(
                f"the tensor {self.names[left[0]]} {list(self.shape(left[0]))} is not used by this head",
                also=listed(left[1:]) or None,
                folder=self.checkpoint.path,
                try_="a head of a kind that is read: " + ", ".join(KINDS),
            )


def read_layout(files: HeadFiles, **overrides: str) -> Layout:
    """Recognise a head and read its switches.

    Args:
        files: an open checkpoint.
        overrides: ``layer_ids`` ("boundary", "layer" or "auto") and ``fed_back`` ("state", "normed" or "auto").

    Raises: CheckpointError naming the tensor or key that decides, or the name of a kind that is known and not computed.
    """
    kind = kind_of(files)
    reader = {EAGLE: _eagle, P_EAGLE: _eagle, DFLASH: _dflash, DSPARK: _dflash}[kind]
    try:
        layout = reader(files, kind, overrides)
    except CheckpointError as error:
        error.facts.setdefault("file", str(files.file))
        raise
    files.refuse_unread_keys()
    return layout


def is_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a draft head and to no model, as far as the config shows."""
    names = config.get("architectures")
    marks = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
    words = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return any(key in config for key in marks) or any(word in {**_ARCHITECTURES, **_REFUSED_NAMES} for word in words)


def kind_of(files: HeadFiles) -> str:
    """The kind of a head, by its tensors; by its config where a tensor that decides is missing.

    Raises: CheckpointError for a kind that is known and not computed, tensors of no known kind, or a config that
        says another kind than the tensors.
    """
    names, config = files.names, files.config
    said = config.get("speculators_model_type")
    architectures = config.get("architectures")
    named = [said, *(architectures if isinstance(architectures, list) else [])]
    nested = config.get("dflash_config")
    if isinstance(nested, Mapping):
        named.append(nested.get("projector_type"))
    words = [word for word in named if isinstance(word, str)]
    refused = next((_REFUSED_NAMES[word] for word in words if word in _REFUSED_NAMES), None)
    if refused is None and ("medusa_num_heads" in config or any(_MEDUSA.fullmatch(name) for name in names)):
        refused = "Medusa"
    decides = next(((name, what) for part, what in _REFUSED_TENSORS for name in names if part in f".{name}"), None)
    if refused is None and decides is not None:
        refused = decides[1]
    if refused is not None:
        raise CheckpointError(
            f"{files.checkpoint.path} is a head of the kind {refused}, which is known and not computed here",
            tensor=None if decides is None else names[decides[0]],
            try_="a head of a kind that is read: " + ", ".join(KINDS),
        )
    found, by = _kind_by_tensors(names)
    declared = _SPECULATORS.get(said) if isinstance(said, str) else None
    if said is not None and declared is None:
        raise CheckpointError(f"config.json: 'speculators_model_type' = {shown(said)} is not read", file=files.file)
    declared = declared or next((_ARCHITECTURES[word] for word in words if word in _ARCHITECTURES), None)
    if found == EAGLE and declared == P_EAGLE:  # P-EAGLE without its mask
        raise CheckpointError("the tensor mask_hidden is missing, which a P-EAGLE head has", file=files.file)
    if declared == EAGLE and found == P_EAGLE and said is None:  # the tensor decides; these layouts have one name
        declared = P_EAGLE
    if found is not None and declared not in (None, found):
        raise CheckpointError(
            f"the tensor {names[by]} says that this is a head of the kind {found!r}, config.json says {declared!r}",
            file=files.file,
            try_="config.json and weights of one and the same head",
        )
    kind = found or declared
    if kind == MTP:
        raise CheckpointError(
            "this is a multi-token-prediction (MTP) head in speculators' layout, which is read with its target",
            folder=files.checkpoint.path,
            try_='target.mtp with this folder and drafter.name = "mtp"; specdec info MODEL --mtp FOLDER describes it',
        )
    if kind is None:
        raise CheckpointError(
            f"{files.checkpoint.path} is no draft head of a known kind",
            tensors=listed(names),
            try_="a head of a kind that is read: " + ", ".join(KINDS),
        )
    return kind


def _kind_by_tensors(names: Mapping[str, str]) -> tuple[str | None, str]:
    """The kind and the tensor that decides it."""
    for name in names:
        if name.startswith("markov_head."):
            return DSPARK, name
        if name.startswith(("mtp.", "mtp_layers.")):
            return MTP, name
        if name == "mask_hidden":
            return P_EAGLE, name
    if "layers.0.hidden_norm.weight" in names:
        return EAGLE, "layers.0.hidden_norm.weight"
    for name in ("hidden_norm.weight", "encoder.output_norm_enc.weight"):
        if name in names and any(other.startswith("layers.0.") for other in names):
            return DFLASH, name
    return None, ""


# --- what all kinds share ------------------------------------------------------------------------------------------


def _speculators(files: HeadFiles) -> tuple[bool, ReadKeys, int | None, str]:
    """Whether the layout is speculators'; the table with the geometry; the depth; the target's name."""
    if files.config.get("speculators_model_type") is None:
        return False, files.config, None, ""
    given = files.config.get("transformer_layer_config")
    model_type = given.get("model_type", "qwen3") if isinstance(given, Mapping) else "qwen3"
    if not isinstance(model_type, str) or model_type not in _CLASS_DEFAULTS:
        raise CheckpointError(
            f"config.json: transformer_layer_config.model_type = {shown(model_type)} is not read; 'llama' and 'qwen3' "
            "are"
        )
    table = files.table("transformer_layer_config", _CLASS_DEFAULTS[model_type])
    about = files.config.get("speculators_config")
    depth, target = None, ""
    if isinstance(about, Mapping):
        methods, verifier = about.get("proposal_methods"), about.get("verifier")
        if isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
            depth = _count(methods[0], "speculative_tokens")
        if isinstance(verifier, Mapping):
            target = str(verifier.get("name_or_path") or "")
    return True, table, depth, target


def _count(table: Mapping[str, Any], key: str) -> int | None:
    """A whole number from 1, or None if the key is absent. Raises: CheckpointError for anything else."""
    value = table.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"config.json: {key!r} takes a whole number from 1, got {shown(value)}")
    return value


def _geometry(files: HeadFiles, table: ReadKeys, *, theta: float | None, width: int) -> Geometry:
    """The sizes of the layers: what tensors show is taken from them, and the config must not contradict.

    Args:
        theta: the default base of the rotary embedding; None if the config must say it.
        width: how many times H_d the first layer's projections take.
    """
    fields = Fields(table)
    hidden = files.shape("norm.weight", 1)[0]
    intermediate = files.shape("layers.0.mlp.gate_proj.weight", 2)[0]
    for key, size in (("hidden_size", hidden), ("intermediate_size", intermediate)):
        stated = fields.whole(key, size)
        if stated != size:
            raise CheckpointError(f"config.json: {key!r} is {stated}, the tensors say {size}")
    fields.must_be("hidden_act", "silu")
    fields.must_be("mlp_bias", False)
    heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    head_dim = fields.whole("head_dim", hidden // heads)
    rows = files.shape("layers.0.self_attn.q_proj.weight")
    if rows != (heads * head_dim, width * hidden):
        raise CheckpointError(
            f"the tensor layers.0.self_attn.q_proj.weight has the shape {list(rows)}; {heads} heads of {head_dim} over "
            f"{width} x {hidden} values take {[heads * head_dim, width * hidden]}",
            try_="config.json and weights of one and the same head",
        )
    layers = len({name.split(".")[1] for name in files.names if name.startswith("layers.")})
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: 'num_attention_heads' ({heads}) is not a multiple of 'num_key_value_heads' ({kv_heads})"
        )
    if theta is None:
        inner = table.get("rope_parameters") or table.get("rope_scaling") or {}
        if table.get("rope_theta") is None and (not isinstance(inner, Mapping) or inner.get("rope_theta") is None):
            raise CheckpointError(
                "config.json lacks 'rope_theta', and the engines that serve such heads take different defaults",
                try_="the theta that the head was trained with",
            )
    rope, factor = fields.rope(head_dim, 1e4 if theta is None else theta, share=1.0)
    bias = table.get("attention_bias", False)
    held = "layers.0.self_attn.q_proj.bias" in files
    if not bias and "layers.0.self_attn.o_proj.bias" in files:
        raise CheckpointError(
            f"config.json: 'attention_bias' is {shown(bias)}, and the tensor layers.0.self_attn.o_proj.bias is there"
        )
    if bool(bias) != held:
        raise CheckpointError(
            f"config.json: 'attention_bias' is {shown(bias)}, and the tensor layers.0.self_attn.q_proj.bias is "
            f"{'there' if held else 'missing'}"
        )
    return Geometry(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=fields.real("rms_norm_eps", 1e-6),
        rope=rope,
        scale=head_dim**-0.5 * factor**2,
        layers=layers,
        windows=_windows(table, fields, layers),
    )


def _windows(table: ReadKeys, fields: Fields, layers: int) -> tuple[int | None, ...]:
    types, window, slides = table.get("layer_types"), table.get("sliding_window"), table.get("use_sliding_window")
    if types is None:
        if table.get("model_type") == "muse_glimmer_assistant":
            raise CheckpointError("config.json lacks 'layer_types', and transformers takes every layer as sliding then")
        if window is not None and slides:
            raise CheckpointError("config.json: 'sliding_window' is given and 'layer_types' is missing")
        return (None,) * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) < layers or any(kind not in known for kind in types):
        raise CheckpointError(f"config.json: 'layer_types' takes {layers} entries out of {', '.join(known)}")
    if "sliding_attention" not in types[:layers]:
        return (None,) * layers
    if slides is False:
        raise CheckpointError("config.json: 'layer_types' has sliding layers, and 'use_sliding_window' is false")
    size = fields.whole("sliding_window")
    return tuple(size if kind == "sliding_attention" else None for kind in types[:layers])


def _vocabulary(files: HeadFiles, table: ReadKeys, draft: int) -> dict[str, Any]:
    """The vocabularies and the map between them, checked. ``draft``: V_d according to the config, or 0."""
    fields = Fields(table)
    stated: int | None = fields.whole("vocab_size") if table.get("vocab_size") is not None else None
    own_embedding, own_head = "embed_tokens.weight" in files, "lm_head.weight" in files
    if own_embedding:
        stated = files.shape("embed_tokens.weight", 2)[0]
    ties = [Fields(one).flag("tie_word_embeddings", False) for one in (table, files.config)]
    tied = any(ties) and own_embedding and not own_head
    if own_head:
        rows = files.shape("lm_head.weight", 2)[0]
        if draft and rows != draft:
            raise CheckpointError(f"config.json: 'draft_vocab_size' is {draft}, and lm_head.weight has {rows} rows")
        draft = rows
    draft = draft or stated or 0
    if stated is not None and draft > stated:
        raise CheckpointError(f"the draft vocabulary has {draft} tokens, more than the target's {stated}")
    if "d2t" not in files:
        if stated is not None and draft != stated:
            raise CheckpointError(
                f"the tensor d2t is missing: nothing says which of {stated} tokens the {draft} of the head are"
            )
        order: tuple[int, ...] = ()
        tokens: tuple[int, ...] | None = None
    else:
        order, tokens = _map(files, draft, stated)
    if not own_head and tokens is not None:  # a tied one would have a row per token of the target
        raise CheckpointError(f"the tensor lm_head.weight is missing: the head has a vocabulary of its own ({draft})")
    return {
        "target_vocab": stated,
        "draft_vocab": draft,
        "tokens": tokens,
        "order": order,
        "own_embedding": own_embedding,
        "own_head": own_head or tied,
    }


def _map(files: HeadFiles, draft: int, target: int | None) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """``order`` and ``tokens`` of a Layout, from the offsets in ``d2t``."""
    offsets = files.checkpoint.load(files.names["d2t"])
    if offsets.dtype not in (torch.int64, torch.int32) or tuple(offsets.shape) != (draft,):
        raise CheckpointError(
            f"the tensor d2t holds {list(offsets.shape)} {offsets.dtype}, and takes an offset per token ({draft})"
        )
    ids = torch.arange(draft) + offsets.long()
    wrong = torch.nonzero((ids < 0) | (ids >= (target if target is not None else 2**31)))
    if len(wrong):
        at = int(wrong[0])
        raise CheckpointError(
            f"the tensor d2t maps the draft token {at} to {int(ids[at])}, outside the target's vocabulary of {target}"
        )
    if len(torch.unique(ids)) != draft:
        raise CheckpointError("the tensor d2t maps two draft tokens to one token of the target")
    if target == draft and bool((offsets == 0).all()):
        return (), None
    ordered, order = torch.sort(ids)
    return tuple(order.tolist()), tuple(ordered.tolist())


def _switch(files: HeadFiles, tables: Sequence[tuple[str, ReadKeys]], key: str, tensor: str | None) -> bool | None:
    """A flag from the first table that has it, checked against the tensor that it promises; None if nothing says.

    Raises: CheckpointError if key and tensor contradict.
    """
    value = next((table.get(key) for _, table in tables if table.get(key) is not None), None)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"config.json: {key!r} takes true or false, got {shown(value)}")
    if tensor is None:
        return value
    held = tensor in files
    if value is not None and value != held:
        raise CheckpointError(
            f"config.json: {key!r} is {shown(value)}, and the tensor {tensor} is {'there' if held else 'missing'}",
            try_="config.json and weights of one and the same head",
        )
    return held


def _ids(tables: Sequence[tuple[str, ReadKeys]], *keys: str) -> tuple[tuple[int, ...] | None, str]:
    """Layer ids and the path of the key that holds them. Raises: CheckpointError if two keys disagree."""
    found: list[tuple[tuple[int, ...], str]] = []
    for path, table in tables:
        for key in keys:
            value = table.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or not value or any(type(i) is not int or i < -1 for i in value):
                raise CheckpointError(f"config.json: {path}{key} takes a list of layer ids, got {shown(value)}")
            if any(a >= b for a, b in zip(value, value[1:], strict=False)):
                raise CheckpointError(
                    f"config.json: {path}{key} = {shown(value)} is not ascending, and engines disagree whether fc "
                    "joins the states in this order or sorted",
                    try_="a head that was trained with ascending ids",
                )
            found.append((tuple(value), path + key))
    if len({ids for ids, _ in found}) > 1:
        raise CheckpointError(f"config.json: {found[0][1]} and {found[1][1]} name different layers")
    return found[0] if found else (None, "")


_CONVENTIONS = {0: "layer boundaries (what enters layer k)", 1: "layers, whose output they name (boundary k + 1)"}


def _shift(overrides: Mapping[str, str], own: int) -> int:
    return {"boundary": 0, "layer": 1}.get(overrides.get("layer_ids", "auto"), own)


# --- EAGLE-3 and P-EAGLE -------------------------------------------------------------------------------------------


def _eagle(files: HeadFiles, kind: str, overrides: Mapping[str, str]) -> Layout:
    ours, table, depth, target = _speculators(files)
    nested = files.table("eagle_config")
    tables = [("", files.config), ("eagle_config.", nested)]
    geometry = _geometry(files, table, theta=1e4, width=2)
    count_key = next((key for key in ("num_aux_hidden_states", "num_aux_layers") if table.get(key) is not None), None)
    _nvidia(nested, files)
    ids, path = _ids(tables, "eagle_aux_hidden_state_layer_ids", "layer_ids")
    uses_states = _switch(files, tables, "use_aux_hidden_state", "fc.weight")
    rules: list[tuple[str, str]] = []
    fed_width = files.shape("fc.weight", 2)[1] if uses_states else geometry.hidden
    count = len(set(ids)) if ids is not None else (Fields(table).whole(count_key) if count_key else 3)
    states = None
    target_hidden = geometry.hidden
    if uses_states:
        shift = _shift(overrides, 1 if path.startswith("eagle_config.eagle") else 0)
        states = States(ids=ids, count=count, shift=shift)
        stated = files.config.get("target_hidden_size")
        target_hidden, rest = divmod(fed_width, count)
        if rest or stated not in (None, target_hidden):
            raise CheckpointError(
                f"the tensor fc.weight takes {fed_width} values, and {count} states of "
                f"{stated or 'one size'} do not fill it"
            )
        where = f"{list(ids)} ({path}), read as {_CONVENTIONS[shift]}" if ids else "2, L/2 and L - 3 (the default)"
        rules.append(("hidden states", where))
    else:
        rules.append(("hidden states", "the state after the target's final norm, and no fc"))
    if geometry.layers > 1 and not ours:
        raise CheckpointError(
            f"the head has {geometry.layers} layers, and outside speculators' layout engines disagree about the norms "
            "of the later ones",
            try_="a head with one layer",
        )
    _count_layers(files, table, geometry.layers, ours)
    before_fc = _switch(files, tables, "norm_before_fc", "input_norm.weight")
    fc_norm = _switch(files, tables, "fc_norm", _first(files, "fc_norm.0.weight", "aux_norm_low.weight"))
    _switch(files, tables, "use_aux_norm", _first(files, "aux_norm_low.weight", "fc_norm.0.weight"))
    rules.append(("norm before fc", "one over all states" if before_fc else "one per state" if fc_norm else "none"))
    residual = _switch(files, tables, "norm_before_residual", None)
    rules.append(
        (
            "residual",
            ("the normed state" if residual else "the state before hidden_norm")
            + (
                ""
                if residual is not None
                else f" ({'speculators' if ours else 'this layout'}'s default; others differ)"
            ),
        )
    )
    said = _switch(files, tables, "norm_output", None)
    fed_back = overrides.get("fed_back", "auto")
    normed = bool(said) and ours if fed_back == "auto" else fed_back == "normed"
    note = ""
    if said and not ours:
        note = ' (norm_output is true: SpecForge trains so; vLLM serves drafter.fed_back = "normed")'
    rules.append(("fed back", ("the output of the final norm" if normed else "the state before the final norm") + note))
    scale = table.get("logit_scale")
    mask = next((files.config.get(key) for key in _MASKS if files.config.get(key) is not None), None)
    if kind == P_EAGLE and type(mask) is not int:
        raise CheckpointError(f"config.json lacks a token for masked rows: one of {', '.join(_MASKS)}")
    if kind == P_EAGLE:
        rules.append(("masked rows", f"token {mask}, with the head's mask_hidden as states"))
    draft = _count(files.config, "draft_vocab_size")
    return Layout(
        kind=kind,
        source="speculators" if ours else "EAGLE" if _named(files, "LlamaForCausalLM") else "SpecForge",
        geometry=geometry,
        states=states,
        target_hidden=target_hidden,
        norm_before_residual=bool(residual),
        norm_output=normed,
        logit_scale=1.0 if scale is None else Fields(table).real("logit_scale"),
        mask_token=mask if kind == P_EAGLE else None,
        depth=depth,
        target=target,
        rules=tuple(rules),
        **_vocabulary(files, table, draft or 0),
    )


_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")


def _named(files: HeadFiles, name: str) -> bool:
    given = files.config.get("architectures")
    return isinstance(given, list) and name in given


def _first(files: HeadFiles, *names: str) -> str:
    return next((name for name in names if name in files), names[0])


def _count_layers(files: HeadFiles, table: ReadKeys, layers: int, strict: bool) -> None:
    """Compare the number of layers; outside speculators the key may be the target's, so the tensors decide."""
    stated = Fields(table).whole("num_hidden_layers", layers, high=MOST_LAYERS)
    if strict and stated != layers:
        raise CheckpointError(f"config.json: 'num_hidden_layers' is {stated}, and there are tensors of {layers} layers")


_NVIDIA: Mapping[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
    "has_lm_head": (True, False),
}


def _nvidia(table: ReadKeys, files: HeadFiles) -> None:
    """Read the keys that NVIDIA's heads carry. Raises: CheckpointError for values that nothing here computes."""
    for key, computed in _NVIDIA.items():
        value = table.get(key)
        if value is not None and value not in computed:
            raise CheckpointError(
                f"config.json: eagle_config.{key} = {shown(value)} is not computed; {shown(computed[0])} is"
            )


# --- DFlash and DSpark ---------------------------------------------------------------------------------------------


def _dflash(files: HeadFiles, kind: str, overrides: Mapping[str, str]) -> Layout:
    ours, table, depth, target = _speculators(files)
    nested = files.table("dflash_config")
    tables = [("", files.config), ("dflash_config.", nested)]
    geometry = _geometry(files, table, theta=1e4 if ours else None, width=1)
    _count_layers(files, table, geometry.layers, True)
    for key, value in (("attention_value_scale", 1), ("is_neox_style", True), ("rope_is_neox_style", True)):
        stated = next((one.get(key) for _, one in tables if one.get(key) is not None), value)
        if stated != value:
            raise CheckpointError(f"config.json: {key!r} = {shown(stated)} is not computed; {shown(value)} is")
    ignored = [key for key in _OF_DFLASH2 for _, one in tables if one.get(key) is not None]
    fc = _first(files, "fc.weight", "encoder.fc.weight")
    own = ("aux_hidden_state_layer_ids",) if ours else ("target_layer_ids",)
    ids, path = _ids(tables, *own)
    if ids is None:
        raise CheckpointError(f"config.json lacks {own[0]!r}: which layers of the target the head reads")
    shift = _shift(overrides, 0 if ours else 1)
    states = States(ids=ids, count=len(set(ids)), shift=shift, final=not ours)
    target_hidden, rest = divmod(files.shape(fc, 2)[1], states.count)
    if rest:
        raise CheckpointError(
            f"the tensor {fc} takes {files.shape(fc)[1]} values, and {states.count} states do not fill it"
        )
    mask = _whole(tables, "mask_token_id", low=0)
    from_anchor = _switch(files, tables, "sample_from_anchor", None)
    anchored = kind == DSPARK if from_anchor is None else from_anchor
    block = _whole(tables, "block_size", low=1 if anchored else 2)
    windows_causal = not _switch(files, tables, "sliding_window_non_causal", None) if ours else False
    causal = any(_switch(files, tables, key, None) for key in ("causal", "is_causal"))
    bidirectional = tuple(not causal and not (window and windows_causal) for window in geometry.windows)
    rules = [
        ("hidden states", f"{list(ids)} ({path}), read as {_CONVENTIONS[shift]}"),
        ("block", f"{block} rows, masked by the token {mask}"),
        (
            "drafts",
            ("from the anchor's row on" if anchored else "from the masked rows")
            + ("" if from_anchor is not None else f" (the default of {kind} heads; vLLM takes the masked rows)"),
        ),
        ("rows of a block", "; ".join(_views(geometry, bidirectional))),
    ]
    if any(geometry.windows):
        rules.append(("windows count from", "the anchor" if ours else "the query"))
    if not ours:
        rules.append(("embedding", "with the scale that the target multiplies it by, if any"))
    if ignored:
        rules.append(("not used", f"{', '.join(ignored)}, which act in DFlash2 only"))
    markov = _markov(files, rules) if kind == DSPARK else {}
    draft = _count(files.config, "draft_vocab_size")
    layers = next((found for _, one in tables if (found := _count(one, "num_target_layers")) is not None), None)
    return Layout(
        kind=kind,
        source="speculators" if ours else "DeepSpec" if kind == DSPARK else "z-lab",
        geometry=geometry,
        states=states,
        target_hidden=target_hidden,
        target_layers=layers,
        mask_token=mask,
        block_size=block,
        from_anchor=anchored,
        bidirectional=bidirectional,
        window_from_anchor=ours,
        scaled_embedding=not ours,
        depth=depth if depth is not None else block if anchored else block - 1,
        target=target,
        rules=tuple(rules),
        **markov,
        **_vocabulary(files, table, draft or 0),
    )


_OF_DFLASH2 = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")


def _views(geometry: Geometry, bidirectional: Sequence[bool]) -> list[str]:
    """What the rows of a block see of each other, layer by layer, in words."""
    words = []
    for window, both in zip(geometry.windows, bidirectional, strict=True):
        span = "full" if window is None else f"window {window}"
        words.append(f"{span}, {'both ways' if both else 'causal'}")
    return [words[0]] if len(set(words)) == 1 else [f"layer {number}: {text}" for number, text in enumerate(words)]


def _whole(tables: Sequence[tuple[str, ReadKeys]], key: str, *, low: int = 1) -> int:
    """A whole number from the tables that have the key. Raises: CheckpointError if none has, or two disagree."""
    found = [value for _, table in tables if (value := table.get(key)) is not None]
    if not found or type(found[0]) is not int or found[0] < low:
        raise CheckpointError(
            f"config.json: {key!r} takes a whole number from {low}, got {shown(found[0] if found else None)}"
        )
    if any(other != found[0] for other in found):
        raise CheckpointError(f"config.json: {key!r} is given twice, as {shown(found[0])} and {shown(found[1])}")
    return int(found[0])


def _markov(files: HeadFiles, rules: list[tuple[str, str]]) -> dict[str, Any]:
    """DSpark's switches: the Markov head by its tensors, the confidence head by its own."""
    fields = Fields(files.config)
    rank = files.shape("markov_head.markov_w1.weight", 2)[1]
    stated = fields.whole("markov_rank", rank)
    if stated != rank:
        raise CheckpointError(
            f"config.json: 'markov_rank' is {stated}, and markov_head.markov_w1.weight has {rank} columns"
        )
    kinds = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
    by_tensors = next((kind for kind, name in kinds.items() if name in files), "vanilla")
    said = files.config.get("markov_head_type")
    if said not in (None, by_tensors):
        raise CheckpointError(f"config.json: 'markov_head_type' is {shown(said)}, the tensors say {by_tensors!r}")
    trusts = _switch(files, [("", files.config)], "enable_confidence_head", "confidence_head.proj.weight")
    joined = False
    if trusts:
        width, hidden = files.shape("confidence_head.proj.weight", 2)[1], files.shape("norm.weight")[0]
        joined = width == hidden + rank
        given = files.config.get("confidence_head_with_markov")
        if width not in (hidden, hidden + rank) or given not in (None, joined):
            raise CheckpointError(
                f"config.json: 'confidence_head_with_markov' is {shown(given)}, and confidence_head.proj.weight reads "
                f"{width} values"
            )
    else:
        files.config.get("confidence_head_with_markov")
    rules.append(("Markov head", f"{by_tensors}, rank {rank}"))
    rules.append(
        ("confidence head", "none" if not trusts else "of the state" + (" and the last token" if joined else ""))
    )
    return {"markov": by_tensors, "markov_rank": rank, "confidence": bool(trusts), "confidence_joined": joined}
