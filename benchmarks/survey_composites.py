"""Tiny backbones of KerasHub that are made of others, for `plan_survey.py`."""

from survey_models import IMAGE
from survey_models import LARGE_IMAGES
from survey_models import MIT
from survey_models import MOBILE_V5
from survey_models import VISION
from survey_models import VIT_DET
from survey_models import WIDTHS

from integration_tests import hub_models
from integration_tests.hub_models import CLASSIC
from integration_tests.hub_models import FEED_FORWARD
from integration_tests.hub_models import GROUPED
from integration_tests.hub_models import HEADS
from integration_tests.hub_models import HIDDEN
from integration_tests.hub_models import LAYERS
from integration_tests.hub_models import LENGTH
from integration_tests.hub_models import POSITIONS
from integration_tests.hub_models import VOCABULARY

HEAD = HIDDEN // HEADS
TEXT = {**CLASSIC, **POSITIONS, "embedding_dim": HIDDEN}


def resnet(**kwargs):
    """Returns a ResNet of four stages."""
    config = {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64, 64, 64],
        "stackwise_num_blocks": [1, 1, 1, 1],
        "stackwise_num_strides": [1, 2, 2, 2],
        "block_type": "basic_block",
    }
    return hub_models.backbone("ResNet", **{**config, **kwargs})


def bas_net():
    """Returns a BASNet on a ResNet."""
    # The first convolution gives the encoder's blocks what its own would.
    return hub_models.backbone(
        "BASNet",
        image_encoder=resnet(stackwise_num_blocks=[2, 2, 2, 2]),
        num_classes=1,
        projection_filters=64,
        **LARGE_IMAGES,
    )


def blip2():
    """Returns a BLIP-2: images, queries and an OPT."""
    from keras_hub.src.models.blip2.blip2_custom_opt import BLIP2CustomOPT
    from keras_hub.src.models.blip2.blip2_qformer import BLIP2QFormer
    from keras_hub.src.models.blip2.blip2_vision_encoder import (
        BLIP2VisionEncoder,
    )

    shared = {"dropout": 0.0, "layer_norm_epsilon": 1e-6}
    vision = {k: v for k, v in VISION.items() if k != "image_shape"}
    return hub_models.backbone(
        "BLIP2",
        vision_encoder=BLIP2VisionEncoder(
            **vision,
            image_size=IMAGE,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.0,
            layer_norm_epsilon=1e-6,
            initializer_range=0.02,
        ),
        qformer=BLIP2QFormer(
            **WIDTHS,
            **shared,
            num_query_tokens=8,
            num_layers=LAYERS,
            num_heads=HEADS,
            vision_dim=HIDDEN,
            cross_attention_frequency=2,
        ),
        language_model=BLIP2CustomOPT(
            **CLASSIC,
            **shared,
            num_query_tokens=8,
            max_sequence_length=LENGTH + 8,
            qformer_hidden_dim=HIDDEN,
        ),
    )


def d_fine():
    """Returns a D-FINE on the last two stages of an HGNetV2."""
    encoder = hub_models.backbone(
        "HGNetV2",
        stem_channels=[3, 16, 16],
        stackwise_stage_filters=[
            [16, 16, 64, 1, 3, 3],
            [64, 32, 128, 1, 3, 3],
            [128, 32, 256, 1, 3, 5],
        ],
        apply_downsample=[False, True, True],
        use_lightweight_conv_block=[False, False, True],
        depths=[1, 1, 1],
        hidden_sizes=[64, 128, 256],
        embedding_size=16,
        use_learnable_affine_block=True,
        hidden_act="relu",
        image_shape=(None, None, 3),
        out_features=["stage2", "stage3"],
    )
    return hub_models.backbone(
        "DFine",
        backbone=encoder,
        image_shape=(None, None, 3),
        out_features=["stage2", "stage3"],
        encoder_in_channels=[128, 256],
        encoder_hidden_dim=HIDDEN,
        encoder_ffn_dim=FEED_FORWARD,
        num_encoder_layers=1,
        encode_proj_layers=[1],
        num_attention_heads=HEADS,
        hidden_expansion=1.0,
        depth_multiplier=0.5,
        hidden_dim=HIDDEN,
        decoder_in_channels=[HIDDEN, HIDDEN],
        num_decoder_layers=LAYERS,
        decoder_attention_heads=HEADS,
        decoder_ffn_dim=FEED_FORWARD,
        decoder_n_points=[4, 4],
        eval_idx=-1,
        num_labels=8,
        num_queries=20,
        num_denoising=0,
        learn_initial_query=False,
        anchor_image_size=(64, 64),
        feat_strides=[8, 16],
        num_feature_levels=2,
        lqe_hidden_dim=HIDDEN,
        num_lqe_layers=2,
        seed=0,
    )


def deep_lab_v3():
    """Returns a DeepLabV3 on a ResNet."""
    return hub_models.backbone(
        "DeepLabV3",
        image_encoder=resnet(block_type="bottleneck_block"),
        spatial_pyramid_pooling_key="P4",
        low_level_feature_key="P2",
        upsampling_size=4,
        dilation_rates=[6, 12, 18],
        projection_filters=16,
        **LARGE_IMAGES,
    )


def depth_anything():
    """Returns a DepthAnything on a DINOv2."""
    # The widths are to each other as those of the smallest preset.
    encoder = hub_models.backbone(
        "DINOV2",
        **{**VISION, "num_layers": 4},
        position_embedding_shape=(IMAGE, IMAGE),
    )
    return hub_models.backbone(
        "DepthAnything",
        image_encoder=encoder,
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[8, 16, 32, 64],
        fusion_hidden_dim=12,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )


def gemma3n():
    """Returns a Gemma 3n that takes images and sound."""
    from keras_hub.src.models.gemma3n.gemma3n_audio_encoder import (
        Gemma3nAudioEncoder,
    )

    vision = hub_models.backbone("MobileNetV5", **MOBILE_V5)
    audio = Gemma3nAudioEncoder(
        hidden_size=HIDDEN,
        input_feat_size=32,
        sscp_conv_channel_size=[8, 16],
        sscp_conv_kernel_size=[(3, 3), (3, 3)],
        sscp_conv_stride_size=[(2, 2), (2, 2)],
        sscp_conv_group_norm_eps=1e-5,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_chunk_size=4,
        num_attention_context_right=5,
        num_attention_context_left=5,
        attention_logit_cap=50.0,
        conv_kernel_size=5,
        reduction_factor=1,
        rms_norm_eps=1e-6,
        gradient_clipping=1.0,
        residual_weight=0.5,
    )
    return hub_models.backbone(
        "Gemma3n",
        text_vocab_size=VOCABULARY,
        text_hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HEAD,
        intermediate_size=[FEED_FORWARD] * LAYERS,
        hidden_activation="gelu_approximate",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        max_position_embeddings=LENGTH,
        rope_theta=10000.0,
        pad_token_id=0,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=8,
        vision_encoder_config=vision.get_config(),
        vision_hidden_size=HIDDEN,
        vision_soft_tokens_per_image=16,
        audio_encoder_config=audio.get_config(),
        audio_hidden_size=HIDDEN,
        audio_soft_tokens_per_image=8,
    )


def gemma4():
    """Returns a Gemma 4 that takes images and sound."""
    from keras_hub.src.models.gemma4.gemma4_audio_encoder import (
        Gemma4AudioEncoder,
    )
    from keras_hub.src.models.gemma4.gemma4_vision_encoder import (
        Gemma4VisionEncoder,
    )

    vision = {k: v for k, v in VISION.items() if k != "image_shape"}
    return hub_models.backbone(
        "Gemma4",
        **GROUPED,
        head_dim=HEAD,
        image_size=IMAGE,
        sliding_window_size=LENGTH,
        vision_encoder=Gemma4VisionEncoder(
            **vision,
            image_size=IMAGE,
            head_dim=HEAD,
            output_dim=HIDDEN,
            pool_size=2,
            position_embedding_size=64,
        ),
        audio_encoder=Gemma4AudioEncoder(
            input_feat_size=32,
            hidden_size=HIDDEN,
            num_heads=HEADS,
            num_layers=1,
            sscp_conv_channels=(16, 8),
            output_proj_dims=HIDDEN,
            output_dim=HIDDEN,
        ),
        num_audio_tokens_per_clip=8,
    )


def meta_clip2():
    """Returns a MetaCLIP 2."""
    hub = hub_models.models()
    return hub.MetaCLIP2Backbone(
        hub.MetaCLIP2VisionEncoder(**VISION),
        hub.MetaCLIP2TextEncoder(**TEXT),
        projection_dim=32,
    )


def par_seq():
    """Returns a PARSeq on a ViT."""
    vision = {k: v for k, v in VISION.items() if k != "intermediate_dim"}
    return hub_models.backbone(
        "PARSeq",
        image_encoder=hub_models.backbone(
            "ViT", **vision, mlp_dim=FEED_FORWARD
        ),
        vocabulary_size=VOCABULARY,
        max_label_length=LENGTH,
        decoder_hidden_dim=HIDDEN,
        decoder_mlp_dim=FEED_FORWARD,
        num_decoder_layers=1,
        num_decoder_heads=HEADS,
    )


def retina_net():
    """Returns a RetinaNet on a ResNet."""
    return hub_models.backbone(
        "RetinaNet",
        image_encoder=resnet(),
        min_level=3,
        max_level=5,
        use_p5=False,
        **LARGE_IMAGES,
    )


def sam():
    """Returns a SAM on a ViTDet."""
    from keras_hub import layers

    return hub_models.backbone(
        "SAM",
        image_encoder=hub_models.backbone("ViTDet", **VIT_DET),
        prompt_encoder=layers.SAMPromptEncoder(
            hidden_size=32,
            image_embedding_size=(8, 8),
            input_image_size=(IMAGE, IMAGE),
            mask_in_channels=16,
        ),
        mask_decoder=layers.SAMMaskDecoder(
            hidden_size=32,
            embedding_dim=32,
            intermediate_dim=128,
            num_layers=LAYERS,
            num_heads=HEADS,
            iou_head_depth=3,
            iou_head_hidden_dim=32,
        ),
    )


def sam3():
    """Returns a SAM 3."""
    from keras_hub import layers

    widths = {**WIDTHS, "num_heads": HEADS, "num_layers": LAYERS}
    images = {**LARGE_IMAGES, "patch_size": 4}
    return hub_models.backbone(
        "SAM3PromptableConcept",
        vision_encoder=layers.SAM3VisionEncoder(
            **widths,
            **images,
            fpn_hidden_dim=HIDDEN,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(IMAGE, IMAGE, 3),
            window_size=2,
            global_attn_indexes=[1],
        ),
        text_encoder=layers.SAM3TextEncoder(
            **widths,
            vocabulary_size=VOCABULARY,
            embedding_dim=HIDDEN,
        ),
        geometry_encoder=layers.SAM3GeometryEncoder(**widths, roi_size=7),
        detr_encoder=layers.SAM3DetrEncoder(**widths),
        detr_decoder=layers.SAM3DetrDecoder(**widths, **images, num_queries=20),
        mask_decoder=layers.SAM3MaskDecoder(
            hidden_dim=HIDDEN, num_heads=HEADS, num_upsampling_stages=3
        ),
    )


def seg_former():
    """Returns a SegFormer on a MiT."""
    return hub_models.backbone(
        "SegFormer",
        image_encoder=hub_models.backbone("MiT", **MIT),
        projection_filters=32,
    )


def sig_lip():
    """Returns a SigLIP."""
    hub = hub_models.models()
    return hub.SigLIPBackbone(
        hub.SigLIPVisionEncoder(**VISION), hub.SigLIPTextEncoder(**TEXT)
    )


def stable_diffusion3():
    """Returns a Stable Diffusion 3 without a T5."""
    from keras_hub.src.models.clip.clip_text_encoder import CLIPTextEncoder
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    filters, blocks = [32, 32, 32, 32], [1, 1, 1, 1]
    text = {**TEXT, "intermediate_output_index": -2}
    small = {"embedding_dim": 32, "hidden_dim": 32, "intermediate_dim": 128}
    return hub_models.backbone(
        "StableDiffusion3",
        mmdit_patch_size=2,
        mmdit_hidden_dim=HIDDEN,
        mmdit_num_layers=LAYERS,
        mmdit_num_heads=HEADS,
        mmdit_position_size=HIDDEN,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        vae=VAEBackbone(filters, blocks, filters, blocks, name="vae"),
        clip_l=CLIPTextEncoder(**{**text, **small}, name="clip_l"),
        clip_g=CLIPTextEncoder(**text, name="clip_g"),
        **LARGE_IMAGES,
    )


BUILDERS = {
    "BASNet": bas_net,
    "BLIP2": blip2,
    "DeepLabV3": deep_lab_v3,
    "DepthAnything": depth_anything,
    "DFine": d_fine,
    "Gemma3n": gemma3n,
    "Gemma4": gemma4,
    "MetaCLIP2": meta_clip2,
    "PARSeq": par_seq,
    "RetinaNet": retina_net,
    "SAM": sam,
    "SAM3PromptableConcept": sam3,
    "SegFormer": seg_former,
    "SigLIP": sig_lip,
    "StableDiffusion3": stable_diffusion3,
}
