"""What a description refuses, and what it takes from a running process."""

import json
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace

import kvferry
import kvferry.vllm
import pytest
import torch
from kvferry.vllm import Unsupported, refusal
from kvferry.vllm.describe import specs
from kvferry.vllm.describe.model import Model
from kept import Attention, Indexer, Latent, Topology, delta_net, linear, mamba2, short_conv
from pools import Engine
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, KVQuantMode


def describe(engine, /, **facts):
    """Rank 0 again, with other facts."""
    config, tensors = engine.stages[0]
    given = dict(
        tp_rank=0,
        pp_rank=0,
        engine="again",
        conv_order=engine.side.conv,
        backends=dict.fromkeys(tensors[0], "FLASH_ATTN"),
        mamba_groups=12,
    )
    return kvferry.vllm.manifest(engine.config, config, tensors[0], **given | facts)


@pytest.fixture
def gqa():
    return Engine("engine", [Attention(4)] * 2, Topology(tp=2))


@pytest.fixture
def hybrid():
    return Engine("engine", [Attention(4), mamba2(), short_conv(), linear()], Topology(tp=2, spec=2))


def other(spec, cls, **facts):
    """A spec of another class."""
    given = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    return cls(**given, **facts)


def test_caches_that_are_not_described_are_refused_by_name(gqa):
    group = gqa.groups[0]
    group.kv_cache_spec = other(group.kv_cache_spec, CrossAttentionSpec)
    with pytest.raises(Unsupported, match="model.layers.0.mixer.*CrossAttentionSpec: what an") as caught:
        describe(gqa)
    assert caught.value.layer == "model.layers.0.mixer"
    assert isinstance(caught.value, kvferry.Error)


def test_what_nobody_has_seen_is_refused_with_its_name_and_what_to_report(gqa, hybrid, monkeypatch):
    group = gqa.groups[0]
    spec = group.kv_cache_spec
    group.kv_cache_spec = other(spec, type("NewSpec", (FullAttentionSpec,), {}))
    report = "have not been seen before; please report it with the model, vLLM's version"
    with pytest.raises(Unsupported, match=f"caches of the kind NewSpec {report}"):
        describe(gqa)
    group.kv_cache_spec = spec
    monkeypatch.delitem(specs.QUANTISED, "NONE")
    with pytest.raises(Unsupported, match=f"caches quantised as NONE {report}"):
        describe(gqa)
    monkeypatch.delitem(specs.RECURRENT, "LINEAR")
    monkeypatch.setitem(specs.QUANTISED, "NONE", None)
    with pytest.raises(Unsupported, match=f"states of the type LINEAR {report}"):
        describe(hybrid)
    latent = Engine("engine", [Latent()], Topology())
    with pytest.raises(Unsupported, match=f"pages of the attention back end NEW_MLA {report}"):
        describe(latent, backends=dict.fromkeys(latent.layers, "NEW_MLA"))
    with pytest.raises(Unsupported, match="ROCM_ATTN is not described: vLLM itself does not run it"):
        describe(latent, backends=dict.fromkeys(latent.layers, "ROCM_ATTN"))
    (layer,) = latent.groups
    for facts in ({"state_content_bytes": 700}, {"state_content_bytes": 656, "cache_dtype_str": "new"}):
        layer.kv_cache_spec = replace(latent.specs["model.layers.0.mixer"], **facts)
        with pytest.raises(Unsupported, match="bytes a token and cache data type .* have not been seen"):
            describe(latent)


def test_states_that_are_dead_after_a_prefill_are_scratch(hybrid):
    group = next(g for g in hybrid.groups if "mixer" in g.layer_names[0] and "1" in g.layer_names[0])
    spec = group.kv_cache_spec
    before = describe(hybrid).to_dict()["groups"]
    # As ReplaySSM appends them: inputs, steps, B.
    extra = ((12, 4, 4), (12, 4), (6, 4, 8))
    group.kv_cache_spec = replace(
        spec,
        shapes=(*spec.shapes, *extra),
        dtypes=(*spec.dtypes, torch.bfloat16, torch.float32, torch.bfloat16),
        page_size_padded=None,
    )
    after = describe(hybrid).to_dict()["groups"]
    number = hybrid.groups.index(group)
    assert after[number]["pieces"] == before[number]["pieces"]
    (dead,) = after[number]["scratch"][len(before[number]["scratch"]) :]
    assert dead["run"] == 2 * 12 * 4 * 4 + 4 * 12 * 4 + 2 * 6 * 4 * 8
    assert dead["offset"] == spec.state_content_size_bytes
    group.kv_cache_spec = replace(
        spec, shapes=(*spec.shapes, (2, 2)), dtypes=(*spec.dtypes, torch.float32)
    )
    with pytest.raises(Unsupported, match="MAMBA2 states of shapes .*where conv and ssm belong"):
        describe(hybrid)


def test_a_back_end_whose_order_is_not_known_is_refused(gqa):
    why = "back end ROCM_ATTN keeps keys and values, and it cannot be asked; choose one of"
    with pytest.raises(Unsupported, match=why):
        describe(gqa, backends=dict.fromkeys(gqa.layers, "ROCM_ATTN"))
    with pytest.raises(Unsupported, match="back end None"):
        describe(gqa, backends={})


def needs(manifest):
    pieces = [p for g in manifest.to_dict()["groups"] for p in g["pieces"]]
    return {p["state"]: p["need"] and p["need"]["tokens"] for p in pieces if p["state"].endswith("/k")}


def test_sliding_layers_that_are_kept_in_full_need_their_window():
    layers = [Attention(4), Attention(4, window=24)]
    engine = Engine("engine", layers, Topology(hma=False))
    # vLLM merges the specs: that of the group has a window, which not all of its layers have.
    assert engine.groups[0].kv_cache_spec.sliding_window == 24
    own = {"layer_specs": engine.specs}
    assert needs(describe(engine, **own)) == {"layers.0/k": None, "layers.1/k": 24}
    assert needs(describe(engine, prefix_caching=True, **own)) == {"layers.0/k": None, "layers.1/k": None}
    # A layer that nobody can ask needs everything.
    assert set(needs(describe(engine)).values()) == {None}
    # From the layers of the process.
    asked = {
        layer: SimpleNamespace(get_kv_cache_spec=lambda config, spec=spec: spec)
        for layer, spec in engine.specs.items()
    }
    engine.config.compilation_config = SimpleNamespace(static_forward_context=asked)
    assert needs(describe(engine)) == {"layers.0/k": None, "layers.1/k": 24}
    # Where vLLM keeps a spec for each layer, it is the layer's own.
    other = Engine("engine", [Attention(4), Attention(2, window=24)], Topology(hma=False))
    assert needs(describe(other, layer_specs={})) == {"layers.0/k": None, "layers.1/k": 24}
    # With the hybrid manager the group itself slides.
    hybrid = Engine("engine", layers, Topology())
    assert set(needs(describe(hybrid, layer_specs=hybrid.specs)).values()) == {None}


def test_quantised_pages_are_records_of_their_own_format(gqa):
    group = gqa.groups[0]
    spec = group.kv_cache_spec
    group.kv_cache_spec = replace(spec, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    (kind,) = describe(gqa).to_dict()["kinds"]
    assert kind["format"] == {"name": "int8_per_token_head 32+32 auto", "bytes": 128}
    assert [axis["name"] for axis in kind["axes"]] == ["head"]
    with pytest.raises(Unsupported, match="CPU back end"):
        describe(gqa, backends=dict.fromkeys(gqa.layers, "CPU_ATTN"))
    group.kv_cache_spec = replace(spec, num_head_slots=4, kv_quant_mode=KVQuantMode.NVFP4)
    with pytest.raises(Unsupported, match="pages of 4 slots for 2 heads .* back end FLASH_ATTN"):
        describe(gqa)


@pytest.mark.parametrize("tiles", [True, False])
def test_keys_and_values_in_tiles_are_refused(gqa, tiles):
    """ROCM_AITER_UNIFIED_ATTN on one kind of GPUs: its name and its specs say nothing of it."""

    class Unified:
        get_name = staticmethod(lambda: "ROCM_AITER_UNIFIED_ATTN")

    layer = SimpleNamespace(
        impl=SimpleNamespace(_shuffle_kv_layout=tiles),
        get_attn_backend=lambda: Unified,
        get_kv_cache_spec=lambda config: gqa.groups[0].kv_cache_spec,
        bind_kv_cache=lambda cache: None,
        kv_cache_dtype="auto",
    )
    gqa.config.compilation_config = SimpleNamespace(static_forward_context=dict.fromkeys(gqa.layers, layer))
    if not tiles:
        describe(gqa)
        return
    with pytest.raises(Unsupported, match="layer '.*': since vLLM 0.33 .* in tiles .* start the engine without it"):
        describe(gqa)


def test_of_two_names_for_one_number_neither_is_guessed(monkeypatch):
    class Mode(IntEnum):
        OCTAVE_K3V4 = 12
        CUSTOM = 12

    monkeypatch.setitem(specs.QUANTISED, "OCTAVE_K3V4", specs.IN_THE_PAGE)
    with pytest.raises(Unsupported, match="layer 'it': caches quantised as OCTAVE_K3V4 or CUSTOM have not"):
        specs.scales_of("it", SimpleNamespace(kv_quant_mode=Mode.CUSTOM))


def test_scales_that_nobody_says_are_refused(gqa):
    group = gqa.groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    with pytest.raises(Unsupported, match="does not say the scales"):
        describe(gqa)
    gqa.config.cache_config = SimpleNamespace(calculate_kv_scales=True, cache_dtype="fp8")
    with pytest.raises(Unsupported, match="load them from the checkpoint"):
        describe(gqa)


def test_facts_that_contradict_each_other_are_refused(gqa, hybrid):
    with pytest.raises(Unsupported, match="should hold 4 of 8 KV heads"):
        describe(gqa, kv_heads=dict.fromkeys(gqa.layers, 8))
    with pytest.raises(Unsupported, match="on one of 2 ranks does not fit .*groups = 5.*`mamba_groups`"):
        describe(hybrid, mamba_groups=5)
    with pytest.raises(ValueError, match="'SD' or 'DS', not 'sd'"):
        describe(hybrid, conv_order="sd")
    one_head = Engine("engine", [Attention(2)], Topology(tp=2))
    one_head.config.model_config.model_arch_config[0].total_num_kv_heads = 8
    with pytest.raises(Unsupported, match="there are 8 in all; say how many there are with `kv_heads`"):
        describe(one_head)
    assert describe(one_head, kv_heads={"model.layers.0.mixer": 2})


def test_a_kind_that_shapes_do_not_tell_is_refused_by_name(monkeypatch):
    net = Engine("engine", [delta_net(value=8, key=4)], Topology(tp=2))
    assert describe(net)
    # Whatever vLLM's type is mapped to: sizes that contradict each other.
    monkeypatch.setitem(specs.RECURRENT, "GDN_ATTN", "kda")
    with pytest.raises(Unsupported, match="'model.layers.0.mixer': the sizes of 'kda' do not fit"):
        describe(net)


def test_the_models_class_tells_replicas_from_shares(monkeypatch):
    from vllm.model_executor.models import ModelRegistry

    def groups(engine, alone):
        """What is found of `engine` where the class would run `alone` on a single rank."""
        spec = alone.spec(replace(engine.side, tp=1))
        tells = SimpleNamespace(
            __name__="Tells", get_mamba_state_shape_from_config=lambda config: spec.shapes
        )
        monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (tells, None))
        engine.config.model_config.architectures = ["Tells"]
        made = describe(engine, mamba_groups=None).to_dict()
        lengths = {
            piece["state"]: made["kinds"][piece["kind"]]["axes"][0]["length"]
            for group in made["groups"]
            for piece in group["pieces"]
        }
        return lengths["layers.0/conv.b"] // 8

    # One group on each rank: the same shapes, of two models.
    for count in (1, 2):
        layer = mamba2(groups=count)
        assert groups(Engine("engine", [layer], Topology(tp=2, spec=1)), layer) == count
    one = Engine("engine", [mamba2(groups=1)], Topology(tp=2))
    with pytest.raises(Unsupported, match="'mamba2' do not fit.*`mamba_groups`"):
        groups(one, mamba2(groups=4))
    silent = SimpleNamespace(__name__="Silent")
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *_, **__: (silent, None))
    with pytest.raises(Unsupported, match="of its kind 'mamba2', and Silent does not say .*`mamba_groups`"):
        describe(one, mamba_groups=None)


def test_layers_without_tensors_or_numbers(gqa):
    config, tensors = gqa.stages[0]
    with pytest.raises(Unsupported, match="model.layers.1.mixer.*no tensor"):
        kvferry.vllm.manifest(
            gqa.config,
            config,
            {"model.layers.0.mixer": tensors[0]["model.layers.0.mixer"]},
            tp_rank=0,
            pp_rank=0,
            engine="again",
            backends=dict.fromkeys(tensors[0], "FLASH_ATTN"),
        )
    config.kv_cache_groups[0].layer_names[0] = "model.encoder"
    with pytest.raises(Unsupported, match="'model.encoder'.*no layer number"):
        describe(gqa)


def test_ranks_of_a_context_parallel_prefill_are_numbered_and_named(gqa, monkeypatch):
    from vllm.distributed import parallel_state

    gqa.config.parallel_config.prefill_context_parallel_size = 2
    monkeypatch.setattr(parallel_state, "get_pcp_group", lambda: SimpleNamespace(rank_in_group=1))
    made = describe(gqa)
    assert (made.rank, made.label) == (2, "pcp1 tp0")
    # It keeps what the other rank keeps.
    first = describe(gqa, pcp_rank=0)
    assert (first.rank, first.label) == (0, "pcp0 tp0")
    assert first.to_dict()["groups"] == made.to_dict()["groups"]


def test_groups_that_are_not_transferred_have_no_table(hybrid):
    count = len(hybrid.groups)
    hybrid.groups[0].enable_kv_transfer = False
    made = describe(hybrid).to_dict()
    assert len(made["groups"]) == count - 1
    assert not any("/k" in p["state"] for g in made["groups"] for p in g["pieces"])


def test_layers_that_read_anothers_cache_keep_none(gqa):
    config, tensors = gqa.stages[0]
    config.kv_cache_groups[0].layer_names.append("model.layers.2.mixer")
    shared = {**tensors[0], "model.layers.2.mixer": tensors[0]["model.layers.1.mixer"]}
    gqa.stages[0] = (config, [shared, shared])
    gqa.config.model_config.get_total_num_hidden_layers = lambda: 3
    states = [p["state"] for p in describe(gqa).to_dict()["groups"][0]["pieces"]]
    assert states == ["layers.0/k", "layers.0/v", "layers.1/k", "layers.1/v"]


def test_names_do_not_depend_on_order():
    names = ["model.layers.0.first", "model.layers.0.second", "model.layers.1.first"]
    engine = Engine("engine", [Attention(4)] * 3, Topology(), names)
    pieces = describe(engine).to_dict()["groups"][0]["pieces"]
    assert {p["state"] for p in pieces if p["state"].endswith("/k")} == {
        "model.layers.0.first/k",
        "model.layers.0.second/k",
        "layers.1/k",
    }


def test_draft_layers_are_named_apart(gqa):
    gqa.config.model_config.get_total_num_hidden_layers = lambda: 1
    states = [p["state"] for p in describe(gqa).to_dict()["groups"][0]["pieces"]]
    assert states == ["layers.0/k", "layers.0/v", "draft/layers.0/k", "draft/layers.0/v"]


def test_layers_that_are_numbered_on_are_no_draft():
    """Falcon-H1's Mamba layers: with `draft` "own" they are handed over all the same."""
    config = SimpleNamespace(get_total_num_hidden_layers=lambda: 36)
    model = Model(SimpleNamespace(model_config=config), 1)
    assert model.place("model.layers.0.self_attn.attn") == model.place("model.36.mixer") == (False, 0)
    assert model.place("model.layers.36.self_attn.attn") == (True, 0)


def test_defaults_come_from_the_process(gqa, monkeypatch):
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    gqa.config.compilation_config = SimpleNamespace(
        static_forward_context=dict.fromkeys(gqa.layers, layer)
    )
    gqa.config.kv_transfer_config = SimpleNamespace(engine_id="prefill-7")
    config, tensors = gqa.stages[0]
    made = kvferry.vllm.manifest(gqa.config, config, tensors[1])
    assert (made.engine, made.rank, made.label) == ("prefill-7", 1, "tp1")
    assert facts_of(made) == {"model": "tiny", "family": "tiny", "format": "bf16"}
    assert made.to_dict()["groups"][0]["pieces"][0]["bounds"] == [[2, 4], [0, 32]]


def facts_of(made):
    """Its identity, without the word that no other kind of engine was shown for this family."""
    identity = dict(made.identity)
    assert identity.pop("engine").startswith("vLLM (of models of the type 'tiny' ")
    return identity


def test_identity(gqa):
    model = gqa.config.model_config
    model.revision, model.quantization = "abc", "fp8"
    model.hf_text_config.rope_parameters = {"rope_theta": 1e6, "factor": 2}
    made = describe(gqa, identity={"model": "served"})
    assert facts_of(made) == {
        "model": "served",
        "family": "tiny",
        "format": "bf16",
        "revision": "abc",
        "quantization": "fp8",
        "positions": '{"factor": 2.0, "rope_theta": 1000000.0, "rope_type": "default"}',
    }


def test_a_model_is_known_by_its_path_and_not_by_the_name_that_it_is_served_under(gqa):
    model = gqa.config.model_config
    model.model, model.served_model_name = "/models/tiny", "tiny"
    made = describe(gqa)
    model.served_model_name = "another"
    assert describe(gqa).identity == made.identity
    model.model = "/data/tiny"
    with pytest.raises(kvferry.Incompatible) as caught:
        kvferry.compile(describe(gqa), [made])
    assert str(caught.value) == (
        "'model' differs: '/models/tiny' on the source (again tp0), '/data/tiny' on the destination. Start both sides "
        "with the same model and settings."
    )


def test_the_keys_of_the_identity_are_those_of_the_facts(gqa, monkeypatch):
    model = gqa.config.model_config
    monkeypatch.setattr("kvferry.vllm.describe.model.weights", lambda *_: "0123")
    model.revision, model.quantization = "abc", "fp8"
    model.hf_text_config.rope_parameters = {"rope_theta": 1e6}
    model.hf_text_config.num_kv_shared_layers = 0
    draft = SimpleNamespace(model="draft")
    gqa.config.speculative_config = SimpleNamespace(
        uses_draft_kv_cache=lambda: True, draft_model_config=draft
    )
    told = kvferry._core.facts()["identity"]
    assert set(describe(gqa).identity) == set(told)
    gqa.config.speculative_config = None
    monkeypatch.undo()
    model.hf_config.model_type = "qwen3"
    model.revision = model.quantization = model.hf_text_config.rope_parameters = None
    del model.hf_text_config.num_kv_shared_layers
    assert set(describe(gqa).identity) == {key for key, it in told.items() if it["required"]}


def test_dumps_for_the_command_line(gqa, tmp_path, monkeypatch):
    made = describe(gqa, engine="host/0")
    monkeypatch.delenv("KVFERRY_DUMP_MANIFEST", raising=False)
    assert kvferry.vllm.dump(made) is None
    monkeypatch.setenv("KVFERRY_DUMP_MANIFEST", str(tmp_path / "new"))
    path = kvferry.vllm.dump(made)
    assert path == tmp_path / "new" / "host_0-tp0.json"
    assert kvferry.Manifest.from_json(path.read_text()) == made
    assert json.loads(path.read_text())["kvferry_manifest"] == 1
    assert list(path.parent.iterdir()) == [path]


def test_gpus_have_their_number():
    device = torch.device("cuda", 3)
    storage = SimpleNamespace(data_ptr=lambda: 4096, nbytes=lambda: 100)
    tensor = SimpleNamespace(untyped_storage=lambda: storage, device=device)
    from kvferry.vllm.describe.geometry import Regions

    regions = Regions()
    assert regions.index(tensor) == regions.index(tensor) == 0
    assert regions.list == [{"base": 4096, "bytes": 100, "place": {"gpu": 3}}]


def test_the_indexer_needs_its_size():
    engine = Engine("engine", [Latent(), Indexer()], Topology())
    text = engine.config.model_config.hf_text_config
    for size, problem in [(64, "a multiple of 128"), (256, "132 bytes"), (None, "132 bytes")]:
        text.index_head_dim = size
        with pytest.raises(Unsupported, match=f"'model.layers.1.mixer': .*{problem}"):
            describe(engine)


def test_unsupported_survives_a_pickle():
    import pickle

    error = pickle.loads(pickle.dumps(refusal.refuse("model.layers.1", "no")))
    assert (error.kind, error.layer, str(error)) == (
        "unsupported",
        "model.layers.1",
        "layer 'model.layers.1': no",
    )


def test_a_delta_net_lies_in_memory_as_its_kernels_see_it():
    engine = Engine("engine", [Attention(4), delta_net(value=8, key=4)], Topology())
    backends = {"FLASH_ATTN": [4 * 8, 4, 1], "GDN_ATTN": [4 * 8, 1, 8]}
    for backend, order in backends.items():
        named = {layer: "FLASH_ATTN" for layer in engine.stages[0][1][0]}
        layer = next(layer for layer in named if "1" in layer)
        made = describe(engine, backends={**named, layer: backend}).to_dict()
        pieces = [piece for group in made["groups"] for piece in group["pieces"]]
        (piece,) = [piece for piece in pieces if piece["state"].endswith("/ssm")]
        size = made["kinds"][piece["kind"]]["format"]["bytes"]
        assert piece["view"]["axes"] == [stride * size for stride in order], backend
