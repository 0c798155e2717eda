"""The cost model against numbers worked out by hand and against published measurements."""

import dataclasses

import pytest

from acceptmoe_jax.runtime import cost_model as cm
from pallas_kernels.devices import DEVICES

MIB = 2**20
GIB = 2**30


def test_a_qwen3_expert_is_nine_mebibytes_and_a_gpt_oss_expert_includes_scales_and_biases():
    assert cm.QWEN3_30B_A3B.bytes_per_expert == 9_437_184 == 9 * MIB
    assert cm.GPT_OSS_120B.bytes_per_expert == 13_236_480


def test_dense_and_expert_weights_add_up_to_the_published_parameter_counts():
    # 30.53 B and 116.83 B parameters; the embedding is the part that a forward does not read.
    qwen, gpt = cm.QWEN3_30B_A3B, cm.GPT_OSS_120B
    embedding = 151936 * 2048
    experts = 48 * 128 * 3 * 2048 * 768
    assert qwen.dense_bytes == 2_459_856_896
    assert qwen.dense_bytes // 2 + experts + embedding == 30_532_122_624
    experts = 36 * 128 * (3 * 2880 * 2880 + 3 * 2880)
    assert gpt.dense_bytes // 2 + experts + 201088 * 2880 == 116_829_156_672


def test_a_head_has_the_bytes_of_its_published_dimensions():
    # q 4096x4096, k and v 512x4096, o 2048x4096, mlp 3x12288x2048, head 32000x2048, 4 norms.
    head = cm.QWEN3_30B_A3B_EAGLE3
    assert head.bytes_per_pass == 2 * 170_401_792
    assert head.fuse_bytes == 2 * 3 * 2048 * 2048
    assert head.round_bytes(5) == 5 * 340_803_584 + 25_165_824


def test_slots_of_48_need_the_published_memory():
    assert cm.QWEN3_30B_A3B.slot_bytes(48) / GIB == pytest.approx(20.25)
    assert cm.QWEN3_30B_A3B.slot_bytes(128) / GIB == pytest.approx(54.0)
    assert cm.GPT_OSS_120B.slot_bytes(48) / GIB == pytest.approx(21.3, abs=0.05)
    assert cm.GPT_OSS_120B.slot_bytes(128) / GIB == pytest.approx(56.8, abs=0.05)


def test_one_more_expert_in_one_layer_costs_5_3_microseconds_at_1_79_terabytes_a_second():
    used = [28.0] * 48
    more = [29.0] + used[1:]
    extra = cm.verification_seconds(cm.QWEN3_30B_A3B, DEVICES["rtx-pro-6000"], more)
    extra -= cm.verification_seconds(cm.QWEN3_30B_A3B, DEVICES["rtx-pro-6000"], used)
    assert extra == pytest.approx(5.272e-6, rel=1e-3)


def test_one_more_expert_in_every_layer_costs_a_quarter_millisecond_on_an_a100():
    # "Limits of Speculation" (2609.22156) measured about 0.26 ms on an A100 40 GB (1.555 TB/s)
    # to 80 GB (2.039 TB/s): the bytes of one expert in 48 layers give 0.22 to 0.29 ms.
    for bandwidth, milliseconds in ((1.555e12, 0.2913), (2.039e12, 0.2222)):
        a100 = dataclasses.replace(DEVICES["h100"], name="A100", memory_bandwidth=bandwidth)
        extra = cm.verification_seconds(cm.QWEN3_30B_A3B, a100, 21)
        extra -= cm.verification_seconds(cm.QWEN3_30B_A3B, a100, 20)
        assert 1e3 * extra == pytest.approx(milliseconds, rel=1e-3)


def test_verification_adds_dense_weights_reads_loads_and_syncs():
    target = cm.TargetShape("tiny", 2, 8, 2, bytes_per_expert=100, dense_bytes=1000)
    device = dataclasses.replace(DEVICES["h100"], memory_bandwidth=1000.0, link_bandwidth=50.0)
    # Dense 1000/1000, reads (3 + 5) * 100 / 1000, loads (1 + 2) * 100 / 50, waves (1 + 2) * 0.25.
    seconds = cm.verification_seconds(target, device, (3, 5), (1, 2), (1, 2), 0.25)
    assert seconds == pytest.approx(1.0 + 0.8 + 6.0 + 0.75)
    assert cm.verification_seconds(target, device, 4) == pytest.approx(1.8)
    assert cm.tokens_per_second(4.5, 1.8, 0.45) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("target", "traffic_mib", "reduction", "standard", "acceptmoe"),
    [
        (cm.QWEN3_30B_A3B, 633, 0.736, 24.4, 6.4),
        (cm.QWEN3_30B_A3B, 464, 0.771, 20.6, 4.7),
        (cm.GPT_OSS_120B, 298, 0.760, 12.0, 2.9),
    ],
)
def test_published_traffic_implies_the_loads_a_layer(
    target, traffic_mib, reduction, standard, acceptmoe
):
    traffic = traffic_mib * MIB
    assert cm.loads_from_traffic(target, traffic, 4.39) == pytest.approx(acceptmoe, abs=0.05)
    unpruned = cm.loads_from_traffic(target, traffic / (1 - reduction), 4.39)
    assert unpruned == pytest.approx(standard, abs=0.05)


def test_counts_that_a_layer_cannot_have_are_refused():
    for used in (-1, 129, [3.0] * 47, float("nan")):
        with pytest.raises(ValueError, match="used"):
            cm.verification_seconds(cm.QWEN3_30B_A3B, DEVICES["h200"], used)
    with pytest.raises(ValueError, match="misses"):
        cm.verification_seconds(cm.QWEN3_30B_A3B, DEVICES["h200"], 3, misses=-1)


def test_modelled_rows_scale_shares_of_a_small_model_to_the_full_size():
    measured = [cm.MeasuredSets("native", 0.5, 4.0), cm.MeasuredSets("acceptmoe", 0.25, 4.0)]
    native, acceptmoe = cm.modelled_rows(
        measured, cm.QWEN3_30B_A3B, cm.QWEN3_30B_A3B_EAGLE3, DEVICES["rtx-pro-6000"]
    )
    assert (native.experts_used, acceptmoe.experts_used) == (64.0, 32.0)
    # 48 * 32 * 9,437,184 + 2,459,856,896 bytes at 1.79 TB/s.
    assert acceptmoe.bytes_per_verification == 16_955_371_520
    assert acceptmoe.floor_milliseconds == pytest.approx(9.4723, rel=1e-4)
    assert native.floor_milliseconds == pytest.approx(17.5703, rel=1e-4)
    # Head: 1,729,183,744 bytes.
    assert native.draft_milliseconds == pytest.approx(0.9660, rel=1e-4)
    assert native.speed_ratio == 1.0
    assert acceptmoe.speed_ratio == pytest.approx((17.5703 + 0.966) / (9.4723 + 0.966), rel=1e-4)


def test_a_shorter_accepted_length_lowers_the_modelled_speed_in_proportion():
    measured = [cm.MeasuredSets("native", 0.5, 4.0), cm.MeasuredSets("cut", 0.5, 3.0)]
    rows = cm.modelled_rows(measured, cm.GPT_OSS_120B, cm.GPT_OSS_120B_EAGLE3, DEVICES["h100"])
    assert rows[1].speed_ratio == pytest.approx(0.75)


def test_plain_decoding_reads_top_k_experts_and_no_head():
    target = cm.QWEN3_30B_A3B
    measured = [cm.autoregressive_sets(target), cm.MeasuredSets("native", 0.5, 4.0)]
    plain, _ = cm.modelled_rows(measured, target, cm.QWEN3_30B_A3B_EAGLE3, DEVICES["h200"])
    assert plain.experts_used == 8
    assert plain.bytes_per_verification == 48 * 8 * 9_437_184 + 2_459_856_896
    assert plain.draft_milliseconds == 0.0


def test_the_modelled_gain_bounds_the_published_one_from_above():
    # Published: 1.290x on an RTX PRO 6000 at |S| of 23 to 34 and a natural union of 52 to 72.
    measured = [
        cm.MeasuredSets("native", 52 / 128, 4.39),
        cm.MeasuredSets("acceptmoe", 34 / 128, 4.39),
    ]
    rows = cm.modelled_rows(
        measured, cm.QWEN3_30B_A3B, cm.QWEN3_30B_A3B_EAGLE3, DEVICES["rtx-pro-6000"]
    )
    assert rows[1].speed_ratio > 1.290


def test_a_missing_baseline_is_refused():
    with pytest.raises(ValueError, match="native"):
        cm.modelled_rows(
            [cm.MeasuredSets("acceptmoe", 0.2, 4.0)],
            cm.QWEN3_30B_A3B,
            cm.QWEN3_30B_A3B_EAGLE3,
            DEVICES["h200"],
        )
