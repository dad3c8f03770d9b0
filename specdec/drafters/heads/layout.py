"""Find out what a head computes: its sizes and switches, by tensors first and config second.

Where the tools that train heads disagree about a default, the one that writes this layout decides, and
``Layout.rules`` says which rule was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from specdec.backends.ops import Rope
from specdec.contract import ModelInfo, Needs
from specdec.drafters.heads.files import (
    DFLASH,
    DSPARK,
    EAGLE,
    LAYER_TABLE,
    P_EAGLE,
    SAME_HEAD,
    HeadFiles,
    architectures,
    kind_of,
    optional_count,
)
from specdec.errors import CheckpointError, UnsupportedError, shown
from specdec.models.decoder import AttentionShape
from specdec.models.fields import LARGEST_EPS, MOST_LAYERS, Fields
from specdec.models.read_keys import ReadKeys

# What speculators leaves out of a config because it equals the class's default.
_DEFAULTS: Mapping[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {
        **_DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "llama": {**_DEFAULTS, "vocab_size": 32000, "intermediate_size": 11008},
}


@attrs.frozen(kw_only=True)
class Geometry:
    """Sizes of a head's decoder layers."""

    hidden: int  # H_d
    intermediate: int
    attention: AttentionShape  # without biases and norms: those are as the tensors say
    eps: float
    windows: tuple[int | None, ...]  # of each layer; None: full attention

    @property
    def layers(self) -> int:
        """Their number."""
        return len(self.windows)


@attrs.frozen(kw_only=True)
class States:
    """Which hidden states of the target a head reads; the fully connected layer joins them in ascending order."""

    ids: tuple[int, ...] | None  # as the config has them; None: the default for this many states
    count: int
    shift: int  # what turns an id into a boundary: 0 for boundaries, 1 for layers, whose output they name
    final: bool = False  # the output of the target's last layer means the state after the final norm

    def of(self, layers: int) -> tuple[tuple[int, ...], bool]:
        """The boundaries of a target with ``layers`` layers, and whether the state after the final norm follows.

        Raises: UnsupportedError for boundaries that this target has not.
        """
        ids = (2, layers // 2, layers - 3) if self.ids is None else tuple(i + self.shift for i in self.ids)
        boundaries = sorted(set(ids))
        if any(not 0 <= k <= layers for k in boundaries) or len(boundaries) != self.count:
            raise UnsupportedError(
                f"the head reads {self.count} states, at the layer boundaries {list(ids)}, and this target has the "
                f"boundaries 0 to {layers}",
                reason="it was trained for another target",
            )
        if self.final and boundaries[-1:] == [layers]:
            return tuple(boundaries[:-1]), True
        return tuple(boundaries), False


@attrs.frozen(kw_only=True)
class Layout:
    """What a head's checkpoint is and which of the layouts' switches it has.

    ``rules`` are facts for ``specdec info``: what was read and, where tools disagree, which rule was taken.
    """

    kind: str  # one of KINDS
    source: str  # the tool whose layout it is: "speculators", "SpecForge", "EAGLE", "z-lab" or "DeepSpec"
    geometry: Geometry
    states: States | None  # that it reads; None: only the state after the final norm, and no fc
    target_hidden: int  # H_t, from the width of fc
    target_layers: int | None = None
    target_vocab: int | None  # V
    draft_vocab: int  # V_d
    tokens: tuple[int, ...] | None = None  # the target's id of every draft id, ascending; None if they are the same
    order: tuple[int, ...] = ()  # draft ids in the order of tokens
    own_embedding: bool  # whether the files hold it
    own_head: bool
    norm_before_residual: bool = False  # the residual is the normed state
    norm_output: bool = False  # a chained step starts from the output of the final norm
    logit_scale: float = 1.0
    mask_token: int | None = None  # of masked rows
    block_size: int = 0  # rows of a block
    from_anchor: bool = False  # the anchor's row gives a draft too
    bidirectional: tuple[bool, ...] = ()  # of each layer: whether the rows of a block see those after them
    window_from_anchor: bool = False  # windows count from the first row of the block, else from each row
    scaled_embedding: bool = False  # embedded tokens carry the target's embedding scale
    markov: str = ""  # the kind of a DSpark head's sequential part
    markov_rank: int = 0
    confidence: bool = False  # a DSpark head predicts acceptance, from the state
    confidence_joined: bool = False  # and from the last token
    depth: int | None = None  # drafts per cycle that it was trained for, if the config says so
    target: str = ""  # the model that it was trained for, if the config says so
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
        self.check_mask(info.vocab_size)
        for what, ours, theirs in (
            ("hidden size", self.target_hidden, info.hidden_size),
            ("vocabulary", self.target_vocab, info.vocab_size),
            ("number of layers", self.target_layers, info.layers),
        ):
            if ours is not None and ours != theirs:
                raise UnsupportedError(
                    f"the head was trained for another target: its {what} is {ours}, this target's is {theirs}",
                    trained_for=self.target or None,
                    try_="a head of this target, or the target that it was trained for",
                )
        self.needs(info)

    def check_mask(self, vocab: int | None) -> None:
        """Refuse a mask token that a vocabulary of this size lacks. Raises: CheckpointError."""
        if vocab is not None and self.mask_token is not None and not 0 <= self.mask_token < vocab:
            raise CheckpointError(
                f"config.json: the mask token {self.mask_token} is outside the target's vocabulary (0 to {vocab - 1})",
                try_=SAME_HEAD,
            )


def read_layout(files: HeadFiles, **overrides: str) -> Layout:
    """Recognise a head and read its switches.

    Args:
        files: an open checkpoint.
        overrides: ``layer_ids`` ("boundary", "layer" or "auto") and ``fed_back`` ("state", "normed" or "auto").

    Raises: CheckpointError naming the tensor or key that decides, or a kind that is not supported.
    """
    try:
        kind = kind_of(files)
        reader = {EAGLE: _eagle, P_EAGLE: _eagle, DFLASH: _dflash, DSPARK: _dflash}[kind]
        layout = reader(files, kind, overrides)
        layout.check_mask(layout.target_vocab)
        files.refuse_unread_keys()
    except CheckpointError as error:
        error.facts.setdefault("file", str(files.checkpoint.path / "config.json"))
        raise
    return layout


# --- what all kinds share ------------------------------------------------------------------------------------------


def _speculators(files: HeadFiles) -> tuple[bool, dict[str, Any]]:
    """Whether the layout is speculators', and what the head was trained for."""
    if files.config.get("speculators_model_type") is None:
        return False, {}
    layer = files.config.get(LAYER_TABLE)
    if layer is None:
        raise CheckpointError(f"config.json lacks {LAYER_TABLE!r}: the sizes of the head's layers")
    model_type = layer.get("model_type", "qwen3") if isinstance(layer, Mapping) else "qwen3"
    if not isinstance(model_type, str) or model_type not in _CLASS_DEFAULTS:
        raise CheckpointError(
            f"config.json: {LAYER_TABLE}.model_type = {shown(model_type)} is not supported; 'llama' and 'qwen3' are"
        )
    trained: dict[str, Any] = {}
    about = files.config.get("speculators_config")
    methods, verifier = (
        (about.get("proposal_methods"), about.get("verifier")) if isinstance(about, Mapping) else ([], {})
    )
    if isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
        trained = {"depth": depth} if (depth := optional_count(methods[0], "speculative_tokens")) else {}
    if isinstance(verifier, Mapping):
        trained["target"] = str(verifier.get("name_or_path") or "")
    files.read_layers(_CLASS_DEFAULTS[model_type])
    return True, trained


def _agree(key: str, stated: Any, actual: Any, tensors: str = "the tensors say") -> None:
    """Raises: CheckpointError if the config says another value than the tensors; None says nothing."""
    if stated not in (None, actual):
        raise CheckpointError(f"config.json: {key!r} is {shown(stated)}, {tensors} {shown(actual)}", try_=SAME_HEAD)


def _geometry(files: HeadFiles, *, theta: float | None, ours: bool) -> Geometry:
    """The sizes of the layers: what tensors show is taken from them, and the config must not contradict.

    ``theta``: the default base of the rotary embedding; None if the config must say it.
    """
    table, fields = files.layers, Fields(files.layers)
    hidden = files.shape("norm.weight", 1)[0]
    intermediate = files.shape("layers.0.mlp.gate_proj.weight", 2)[0]
    _agree("hidden_size", fields.whole("hidden_size", hidden), hidden)
    _agree("intermediate_size", fields.whole("intermediate_size", intermediate), intermediate)
    heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    head_dim = fields.whole("head_dim", hidden // heads)
    if theta is None:
        inner = table.get("rope_parameters") or table.get("rope_scaling") or {}
        if table.get("rope_theta") is None and (not isinstance(inner, Mapping) or inner.get("rope_theta") is None):
            raise CheckpointError(
                "config.json lacks 'rope_theta', and the engines that serve such heads take different defaults",
                try_="the theta that the head was trained with",
            )
    base = 1e4 if theta is None else theta
    if ours and fields.rope_kind() == "default":  # speculators' Llama and Qwen3 layers rotate the whole head then
        fields.partial_rotary_factor(1.0)
        rope, factor = Rope.of(fields.rope_theta(base), head_dim), 1.0
    else:
        rope, factor = fields.rope(head_dim, base, share=1.0)
    bias = table.get("attention_bias", False)
    for tensor, needed in (("q_proj.bias", True), ("o_proj.bias", False)):
        name = f"layers.0.self_attn.{tensor}"
        if bool(bias) != (name in files) and (needed or not bias):
            raise CheckpointError(
                f"config.json: 'attention_bias' is {shown(bias)}, and the tensor {name} is "
                f"{'there' if name in files else 'missing'}"
            )
    layers = len({name.split(".")[1] for name in files.names if name.startswith("layers.")})
    return Geometry(
        hidden=hidden,
        intermediate=intermediate,
        attention=AttentionShape(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, scale=head_dim**-0.5 * factor**2
        ),
        eps=fields.real("rms_norm_eps", 1e-6, high=LARGEST_EPS),
        windows=_windows(table, fields, layers),
    )


def _windows(table: ReadKeys, fields: Fields, layers: int) -> tuple[int | None, ...]:
    types, window, slides = (table.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    if types is None:
        if table.get("model_type") == "muse_glimmer_assistant":
            raise CheckpointError("config.json lacks 'layer_types', and transformers takes every layer as sliding then")
        if window is not None and slides:
            raise CheckpointError("config.json: 'sliding_window' is given and 'layer_types' is missing")
        return (None,) * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) < layers or any(kind not in known for kind in types):
        raise CheckpointError(f"config.json: 'layer_types' takes {layers} entries out of {', '.join(known)}")
    sliding = [kind == "sliding_attention" for kind in types[:layers]]
    if any(sliding) and slides is False:
        raise CheckpointError("config.json: 'layer_types' has sliding layers, and 'use_sliding_window' is false")
    size = fields.whole("sliding_window") if any(sliding) else None
    return tuple(size if slide else None for slide in sliding)


def _vocabulary(files: HeadFiles) -> dict[str, Any]:
    """The vocabularies and the map between them, checked."""
    target, draft = optional_count(files.layers, "vocab_size"), optional_count(files.config, "draft_vocab_size")
    own_embedding, own_head = "embed_tokens.weight" in files, "lm_head.weight" in files
    if own_embedding:
        target = files.shape("embed_tokens.weight", 2)[0]
    ties = [Fields(keys).flag("tie_word_embeddings", False) for keys in (files.layers, files.config)]
    tied = any(ties) and own_embedding and not own_head
    if own_head:
        rows = files.shape("lm_head.weight", 2)[0]
        _agree("draft_vocab_size", draft, rows, "the rows of lm_head.weight are")
        draft = rows
    draft = draft or target or 0
    if target is not None and draft > target:
        raise CheckpointError(f"the draft vocabulary has {draft} tokens, more than the target's {target}")
    order: tuple[int, ...] = ()
    tokens: tuple[int, ...] | None = None
    if "d2t" in files:
        order, tokens = _map(files, draft, target)
    elif target not in (None, draft):
        raise CheckpointError(
            f"the tensor d2t is missing: nothing says which of {target} tokens the {draft} of the head are"
        )
    if not own_head and tokens is not None:  # a tied one would have a row per token of the target
        raise CheckpointError(f"the tensor lm_head.weight is missing: the head has a vocabulary of its own ({draft})")
    return {
        "target_vocab": target,
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
    ordered, order = torch.sort(ids)
    if "t2d" in files:
        flags = files.checkpoint.load(files.names["t2d"])
        if flags.dim() != 1 or not torch.equal(torch.nonzero(flags).flatten(), ordered):
            raise CheckpointError(
                "the tensors d2t and t2d name different tokens of the target",
                reason="d2t holds offsets: draft token i is token i + d2t[i] of the target",
                try_="the file as its trainer saved it",
            )
    if target == draft and bool((offsets == 0).all()):
        return (), None
    return tuple(order.tolist()), tuple(ordered.tolist())


def _ids(files: HeadFiles, *keys: str) -> tuple[tuple[int, ...] | None, str]:
    """Layer ids and the path of the key that holds them. Raises: CheckpointError if two keys disagree."""
    places = [(files.path(key), value) for key in keys if (value := files.config.get(key)) is not None]
    for path, value in places:
        if not isinstance(value, list) or not value or any(type(i) is not int or i < -1 for i in value):
            raise CheckpointError(f"config.json: {path} takes a list of layer ids, got {shown(value)}")
        if any(a >= b for a, b in zip(value, value[1:], strict=False)):
            raise CheckpointError(
                f"config.json: {path} = {shown(value)} is not ascending, and engines disagree whether fc joins the "
                "states in this order or sorted",
                try_="a head that was trained with ascending ids",
            )
        if value != places[0][1]:
            raise CheckpointError(f"config.json: {places[0][0]} and {path} name different layers")
    return (tuple(places[0][1]), places[0][0]) if places else (None, "")


def _state_width(files: HeadFiles, fc: str, states: int) -> int:
    """H_t, from the width of ``fc``. Raises: CheckpointError if so many states do not fill it."""
    width = files.shape(fc, 2)[1]
    if width % states:
        raise CheckpointError(f"the tensor {fc} takes {width} values, and {states} states do not fill it")
    return width // states


_CONVENTIONS = {0: "layer boundaries (what enters layer k)", 1: "layers, whose output they name (boundary k + 1)"}


def _shift(overrides: Mapping[str, str], default: int) -> int:
    return {"boundary": 0, "layer": 1}.get(overrides.get("layer_ids", "auto"), default)


def _count_layers(table: ReadKeys, layers: int, *, strict: bool) -> None:
    """Compare the number of layers; outside speculators the key may be the target's, so the tensors decide."""
    stated = Fields(table).whole("num_hidden_layers", layers, high=MOST_LAYERS)
    if strict:
        _agree("num_hidden_layers", stated, layers)


# --- EAGLE-3 and P-EAGLE -------------------------------------------------------------------------------------------

_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")


def _eagle(files: HeadFiles, kind: str, overrides: Mapping[str, str]) -> Layout:
    ours, trained = _speculators(files)
    geometry = _geometry(files, theta=1e4, ours=ours)
    if geometry.layers > 1 and not ours:
        raise CheckpointError(
            f"the head has {geometry.layers} layers, and outside speculators' layout engines disagree about the norms "
            "of the later ones",
            try_="a head with one layer",
        )
    _count_layers(files.layers, geometry.layers, strict=ours)
    states, target_hidden, source = _eagle_states(files, geometry, overrides)
    before_fc = files.flag("norm_before_fc", "input_norm.weight")
    norms = "fc_norm.0.weight", "aux_norm_low.weight"
    fc_norm, _ = files.flag("fc_norm", *norms), files.flag("use_aux_norm", *reversed(norms))
    residual, normed = files.flag("norm_before_residual"), files.flag("norm_output")
    fed_back = overrides.get("fed_back", "auto")
    note = ""
    if normed and not ours:
        note = ' (norm_output is true: SpecForge trains so; vLLM serves drafter.fed_back = "normed")'
    norm_output = bool(normed) and ours if fed_back == "auto" else fed_back == "normed"
    default = f" ({'speculators' if ours else 'this layout'}'s default; others differ)" if residual is None else ""
    rules = [
        ("hidden states", source),
        ("norm before fc", "one over all states" if before_fc else "one per state" if fc_norm else "none"),
        ("residual", ("the normed state" if residual else "the state before hidden_norm") + default),
        ("fed back", f"{'the output of' if norm_output else 'the state before'} the final norm{note}"),
    ]
    mask = next((value for key in _MASKS if (value := files.config.get(key)) is not None), None)
    if kind == P_EAGLE:
        if type(mask) is not int:
            raise CheckpointError(f"config.json lacks a token for masked rows: one of {', '.join(_MASKS)}")
        rules.append(("masked rows", f"token {mask}, with the head's mask_hidden as states"))
    return Layout(
        kind=kind,
        source="speculators" if ours else "EAGLE" if "LlamaForCausalLM" in architectures(files.config) else "SpecForge",
        geometry=geometry,
        states=states,
        target_hidden=target_hidden,
        norm_before_residual=bool(residual),
        norm_output=norm_output,
        logit_scale=Fields(files.layers).real("logit_scale", 1.0),
        mask_token=mask if kind == P_EAGLE else None,
        rules=tuple(rules),
        **trained,
        **_vocabulary(files),
    )


def _eagle_states(files: HeadFiles, geometry: Geometry, overrides: Mapping[str, str]) -> tuple[States | None, int, str]:
    """Which states the head reads, H_t, and where that was read."""
    counts = [optional_count(files.layers, key) for key in ("num_aux_hidden_states", "num_aux_layers")]
    ids, path = _ids(files, "eagle_aux_hidden_state_layer_ids", "layer_ids")
    if not files.flag("use_aux_hidden_state", "fc.weight"):
        return None, geometry.hidden, "the state after the target's final norm, and no fc"
    count = len(ids) if ids is not None else next((count for count in counts if count), 3)
    shift = _shift(overrides, 1 if path.startswith("eagle_config.eagle") else 0)
    target_hidden = _state_width(files, "fc.weight", count)
    _agree("target_hidden_size", files.config.get("target_hidden_size"), target_hidden, "fc.weight says")
    source = f"{list(ids)} ({path}), read as {_CONVENTIONS[shift]}" if ids else "2, L/2 and L - 3 (the default)"
    return States(ids=ids, count=count, shift=shift), target_hidden, source


# --- DFlash and DSpark ---------------------------------------------------------------------------------------------

_OF_DFLASH2 = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")


def _dflash(files: HeadFiles, kind: str, overrides: Mapping[str, str]) -> Layout:
    ours, trained = _speculators(files)
    geometry = _geometry(files, theta=1e4 if ours else None, ours=ours)
    _count_layers(files.layers, geometry.layers, strict=True)
    ids_key = "aux_hidden_state_layer_ids" if ours else "target_layer_ids"
    ids, path = _ids(files, ids_key)
    if ids is None:
        raise CheckpointError(f"config.json lacks {ids_key!r}: which layers of the target the head reads")
    shift = _shift(overrides, 0 if ours else 1)
    mask = Fields(files.config).whole("mask_token_id", low=0)
    from_anchor = files.flag("sample_from_anchor")
    anchored = kind == DSPARK if from_anchor is None else from_anchor
    block = Fields(files.config).whole("block_size", low=1 if anchored else 2)
    windows_causal = ours and not files.flag("sliding_window_non_causal")
    causal = [files.flag("causal"), files.flag("is_causal")]
    bidirectional = tuple(not any(causal) and not (window and windows_causal) for window in geometry.windows)
    default = "" if from_anchor is not None else f" (the default of {kind} heads; vLLM takes the masked rows)"
    rules = [
        ("hidden states", f"{list(ids)} ({path}), read as {_CONVENTIONS[shift]}"),
        ("block", f"{block} rows, masked by the token {mask}"),
        ("drafts", ("from the anchor's row on" if anchored else "from the masked rows") + default),
        ("rows of a block", "; ".join(_views(geometry, bidirectional))),
    ]
    if any(geometry.windows):
        rules.append(("windows count from", "the anchor" if ours else "the query"))
    if not ours:
        rules.append(("embedding", "with the scale that the target multiplies it by, if any"))
    if ignored := [key for key in _OF_DFLASH2 if files.config.get(key) is not None]:
        rules.append(("not used", f"{', '.join(ignored)}, which act in DFlash2 only"))
    markov = _markov(files, rules) if kind == DSPARK else {}
    return Layout(
        kind=kind,
        source="speculators" if ours else "DeepSpec" if kind == DSPARK else "z-lab",
        geometry=geometry,
        states=States(ids=ids, count=len(ids), shift=shift, final=not ours),
        target_hidden=_state_width(files, files.first("fc.weight", "encoder.fc.weight"), len(ids)),
        target_layers=optional_count(files.config, "num_target_layers"),
        mask_token=mask,
        block_size=block,
        from_anchor=anchored,
        bidirectional=bidirectional,
        window_from_anchor=ours,
        scaled_embedding=not ours,
        rules=tuple(rules),
        **{"depth": block if anchored else block - 1, **trained},
        **markov,
        **_vocabulary(files),
    )


def _views(geometry: Geometry, bidirectional: Sequence[bool]) -> list[str]:
    """What the rows of a block see of each other, layer by layer, in words."""
    words = []
    for window, both in zip(geometry.windows, bidirectional, strict=True):
        span = "full" if window is None else f"window {window}"
        words.append(f"{span}, {'both ways' if both else 'causal'}")
    return [words[0]] if len(set(words)) == 1 else [f"layer {number}: {text}" for number, text in enumerate(words)]


def _markov(files: HeadFiles, rules: list[tuple[str, str]]) -> dict[str, Any]:
    """DSpark's switches: the Markov head by its tensors, the confidence head by its own."""
    rank = files.shape("markov_head.markov_w1.weight", 2)[1]
    _agree("markov_rank", optional_count(files.config, "markov_rank"), rank)
    kinds = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
    kind = next((kind for kind, name in kinds.items() if name in files), "vanilla")
    _agree("markov_head_type", files.config.get("markov_head_type"), kind)
    joined, stated = False, files.config.get("confidence_head_with_markov")
    confidence = bool(files.flag("enable_confidence_head", "confidence_head.proj.weight"))
    if confidence:
        width, hidden = files.shape("confidence_head.proj.weight", 2)[1], files.shape("norm.weight")[0]
        joined = width == hidden + rank
        if width not in (hidden, hidden + rank) or stated not in (None, joined):
            raise CheckpointError(
                f"config.json: 'confidence_head_with_markov' is {shown(stated)}, and confidence_head.proj.weight reads "
                f"{width} values"
            )
    rules.append(("Markov head", f"{kind}, rank {rank}"))
    reads = "of the state" + (" and the last token" if joined else "")
    rules.append(("confidence head", reads if confidence else "none"))
    return {"markov": kind, "markov_rank": rank, "confidence": confidence, "confidence_joined": joined}
