"""Tiny configurations of backbones of KerasHub, for `plan_survey.py`.

They are beside those of `hub_models`, whose plans are kept as files. As there,
all dims that count divide by 4 but the heads of keys and values of the models
that have fewer of them than of queries.
"""

import keras

from integration_tests.hub_models import CLASSIC
from integration_tests.hub_models import FEED_FORWARD
from integration_tests.hub_models import GROUPED
from integration_tests.hub_models import HEADS
from integration_tests.hub_models import HIDDEN
from integration_tests.hub_models import LAYERS
from integration_tests.hub_models import LENGTH
from integration_tests.hub_models import POSITIONS
from integration_tests.hub_models import TOKENS
from integration_tests.hub_models import VOCABULARY

IMAGE = 32
IMAGES = {"image_shape": (IMAGE, IMAGE, 3)}
LARGE_IMAGES = {"image_shape": (64, 64, 3)}
HEAD = HIDDEN // HEADS
EXPERTS = {"num_experts": 4, "top_k": 2}
WIDTHS = {"hidden_dim": HIDDEN, "intermediate_dim": FEED_FORWARD}
VISION = {
    **IMAGES,
    **WIDTHS,
    "patch_size": 4,
    "num_layers": LAYERS,
    "num_heads": HEADS,
}
MIT = {
    **LARGE_IMAGES,
    "num_layers": 4,
    "hidden_dims": [16, 32, 64, 128],
    "layerwise_depths": [1, 1, 1, 1],
    "layerwise_num_heads": [4, 4, 4, 4],
    "layerwise_sr_ratios": [8, 4, 2, 1],
    "layerwise_patch_sizes": [7, 3, 3, 3],
    "layerwise_strides": [4, 2, 2, 2],
    "max_drop_path_rate": 0.1,
}
# A block that widens, one that inverts, and attention over pixels.
MOBILE_V5 = {
    **IMAGES,
    "stackwise_block_types": [["er"], ["uir", "mqa"]],
    "stackwise_num_blocks": [1, 2],
    "stackwise_num_filters": [[24], [48, 48]],
    "stackwise_strides": [[2], [2, 1]],
    "stackwise_act_layers": [["relu"], ["relu", "relu"]],
    "stackwise_exp_ratios": [[4.0], [4.0, 1.0]],
    "stackwise_se_ratios": [[0.0], [0.0, 0.0]],
    "stackwise_dw_kernel_sizes": [[0], [5, 3]],
    "stackwise_dw_start_kernel_sizes": [[0], [0, 0]],
    "stackwise_dw_end_kernel_sizes": [[0], [0, 0]],
    "stackwise_exp_kernel_sizes": [[3], [0, 0]],
    "stackwise_pw_kernel_sizes": [[1], [0, 0]],
    "stackwise_num_heads": [[0], [0, HEADS]],
    "stackwise_key_dims": [[0], [0, HEAD]],
    "stackwise_value_dims": [[0], [0, HEAD]],
    "stackwise_kv_strides": [[0], [0, 1]],
    "stackwise_use_cpe": [[False], [False, False]],
    "num_features": HIDDEN,
    "msfa_output_resolution": 4,
}
VIT_DET = {
    **IMAGES,
    "hidden_size": HIDDEN,
    "intermediate_dim": FEED_FORWARD,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "patch_size": 4,
    # The other layer attends in windows.
    "global_attention_layer_indices": [1],
    "window_size": 2,
    "num_output_channels": 32,
}
# Layers with linear attention, and others.
HYBRID = {
    **TOKENS,
    "num_query_heads": HEADS,
    "num_key_value_heads": 2,
    "hidden_dim": HIDDEN,
    "head_dim": HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ENCODER_DECODER = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {
        **WIDTHS,
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "layer_types": ["full_attention"] * LAYERS,
    }.items()
}

CONFIGS = {
    "CSPNet": {
        **IMAGES,
        "stem_filters": 32,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stem_padding": "same",
        "stackwise_depth": [1, 2],
        "stackwise_strides": 2,
        "stackwise_num_filters": [32, 64],
        "block_type": "dark_block",
        "stage_type": "csp",
        "down_growth": True,
        "bottle_ratio": (0.5, 1.0),
        "block_ratio": (1.0, 0.5),
        "expand_ratio": (2.0, 1.0),
    },
    "DebertaV3": {**CLASSIC, **POSITIONS, "bucket_size": 8},
    "DeiT": VISION,
    "DenseNet": {**IMAGES, "stackwise_num_repeats": [2, 2]},
    "DINOV2": {**VISION, "position_embedding_shape": (IMAGE, IMAGE, 3)},
    "DINOV3": VISION,
    "EdRec": {
        **WIDTHS,
        "vocab_size": VOCABULARY,
        "num_layers_enc": LAYERS,
        "num_layers_dec": LAYERS,
        "num_heads": HEADS,
    },
    "Electra": {
        **{k: v for k, v in CLASSIC.items() if k != "vocabulary_size"},
        **POSITIONS,
        "vocab_size": VOCABULARY,
        "embedding_dim": 32,
    },
    "ESM": {**CLASSIC, **POSITIONS},
    "Flux": {
        "input_channels": 16,
        "hidden_size": HIDDEN,
        "mlp_ratio": 4.0,
        "num_heads": HEADS,
        "depth": LAYERS,
        "depth_single_blocks": LAYERS,
        "axes_dim": [4, 6, 6],
        "theta": 10000,
        "use_bias": True,
        "guidance_embed": True,
        "image_shape": (LENGTH, 16),
        "image_ids_shape": (LENGTH, 3),
        "text_shape": (8, 32),
        "text_ids_shape": (8, 3),
        "y_shape": (32,),
    },
    "FNet": {
        **{k: v for k, v in CLASSIC.items() if k != "num_heads"},
        **POSITIONS,
    },
    "Gemma3": {**GROUPED, "image_size": IMAGE, "head_dim": HEAD},
    "GptOss": {**GROUPED, **EXPERTS, "sliding_window": LENGTH},
    "HGNetV2": {
        **IMAGES,
        "depths": [1, 2],
        "embedding_size": 16,
        "hidden_sizes": [64, 128],
        "stem_channels": [3, 16, 16],
        "hidden_act": "relu",
        "use_learnable_affine_block": False,
        "stackwise_stage_filters": [
            (16, 16, 64, 1, 1, 3),
            (64, 32, 128, 2, 1, 3),
        ],
        "apply_downsample": [False, True],
        "use_lightweight_conv_block": [False, True],
    },
    "MiT": MIT,
    "MobileNet": {
        **IMAGES,
        "stackwise_expansion": [[40, 56], [64, 144]],
        "stackwise_num_blocks": [2, 2],
        "stackwise_num_filters": [[16, 16], [24, 24]],
        "stackwise_kernel_size": [[3, 3], [5, 5]],
        "stackwise_num_strides": [[2, 1], [2, 1]],
        "stackwise_se_ratio": [[None, None], [0.25, 0.25]],
        "stackwise_activation": [["relu", "relu"], ["hard_swish"] * 2],
        "stackwise_padding": [[1, 1], [2, 2]],
        "input_num_filters": 16,
        "output_num_filters": 288,
        "depthwise_filters": 16,
        "depthwise_stride": 1,
        "depthwise_residual": True,
        "last_layer_filter": 32,
        "squeeze_and_excite": 0.5,
    },
    "MobileNetV5": MOBILE_V5,
    "Moonshine": {
        **WIDTHS,
        "vocabulary_size": VOCABULARY,
        "filter_dim": HIDDEN,
        "encoder_num_layers": LAYERS,
        "decoder_num_layers": LAYERS,
        "encoder_num_heads": HEADS,
        "decoder_num_heads": HEADS,
    },
    "PaliGemma": {
        **GROUPED,
        "image_size": IMAGE,
        "head_dim": HEAD,
        "vit_patch_size": 4,
        "vit_num_heads": HEADS,
        "vit_hidden_dim": HIDDEN,
        "vit_num_layers": LAYERS,
        "vit_intermediate_dim": FEED_FORWARD,
    },
    "Qwen3": {**GROUPED, "head_dim": HEAD},
    "Qwen3_5": {**HYBRID, "intermediate_dim": FEED_FORWARD},
    "Qwen3_5Moe": {
        **HYBRID,
        **EXPERTS,
        "moe_intermediate_dim": 128,
        "shared_expert_intermediate_size": 128,
    },
    "Qwen3Moe": {**GROUPED, **EXPERTS, "moe_intermediate_dim": 128},
    "QwenMoe": {
        **GROUPED,
        **EXPERTS,
        "moe_intermediate_dim": 128,
        "shared_expert_intermediate_dim": 128,
    },
    "RoformerV2": {**CLASSIC, "head_size": HEAD},
    "RWKV7": {
        **TOKENS,
        "hidden_size": HIDDEN,
        "head_size": HEAD,
        "intermediate_dim": FEED_FORWARD,
    },
    "SmolLM3": {
        **TOKENS,
        **WIDTHS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True] * LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": LENGTH,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "SwinTransformer": {
        **IMAGES,
        "embed_dim": 32,
        "depths": [2, 2],
        "num_heads": [4, 4],
        "window_size": 4,
    },
    "T5Gemma": {**ENCODER_DECODER, "vocabulary_size": VOCABULARY},
    "T5Gemma2": {**ENCODER_DECODER, "vocabulary_size": VOCABULARY},
    "VGG": {
        **IMAGES,
        "stackwise_num_repeats": [2, 2],
        "stackwise_num_filters": [32, 64],
    },
    "VideoPrism": {
        **IMAGES,
        **WIDTHS,
        "num_frames": 2,
        "patch_size": 4,
        "num_heads": HEADS,
        "num_spatial_layers": LAYERS,
        "num_temporal_layers": LAYERS,
        "num_auxiliary_layers": 1,
        "vocabulary_size": VOCABULARY,
        "num_text_layers": LAYERS,
    },
    "ViTDet": VIT_DET,
    "Xception": {
        **LARGE_IMAGES,
        "stackwise_conv_filters": [[32, 64], [64, 128], [128, 128]],
        "stackwise_pooling": [True, True, False],
    },
    "XLMRoberta": {**CLASSIC, **POSITIONS},
    "XLNet": CLASSIC,
}


def _tokens(*names):
    return {name: (None, LENGTH) for name in names}


# Shapes of inputs that must not be what the planner takes for unknown dims:
# lengths that a model needs whole, or that have to fit each other.
INPUT_SPECS = {
    "Gemma3n": [
        keras.KerasTensor((None, LENGTH), "int32"),
        keras.KerasTensor((None, LENGTH), "bool"),
        (None, 1, IMAGE, IMAGE, 3),
        (None, 1, 32, 32),
        keras.KerasTensor((None, 1, 32), "bool"),
    ],
    "Gemma4": {
        **_tokens("padding_mask", "position_ids", "token_ids"),
        "pixel_values": (None, 1, 64, 48),
        "pixel_position_ids": keras.KerasTensor((None, 1, 64, 2), "int32"),
        "vision_indices": (None, 16),
        "vision_mask": (None, LENGTH),
        "audio_mel": (None, 1, 32, 32),
        "audio_mel_mask": (None, 1, 32),
        "audio_indices": (None, 8),
        "audio_mask": (None, LENGTH),
    },
    "Moonshine": {
        "encoder_input_values": (None, 4096, 1),
        "encoder_padding_mask": (None, 4096),
        **_tokens("decoder_token_ids", "decoder_padding_mask"),
    },
    "SigLIP": {
        "images": (None, IMAGE, IMAGE, 3),
        **_tokens("token_ids"),
    },
}
