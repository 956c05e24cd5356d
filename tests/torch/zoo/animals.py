"""The zoo: small models from configurations and from own.py, with batches and a loss for each."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import own
from .animal import (
    EXPERTS,
    HEADS,
    ROWS,
    STILL,
    TIME,
    WIDTH,
    WORDS,
    Animal,
    causal,
    class_loss,
    hugging_face,
    ids,
    image,
    masked,
    pair,
    seq2seq,
    text,
    token_loss,
    two_losses,
)
from .families import FAMILIES

WITH_EXPERTS = ("qwen2-moe", "qwen3-moe", "mixtral", "deepseek-v3", "olmoe", "gpt-oss", "qwen3-next")
WITHOUT_SEQUENCES = (
    "vit", "swin", "clip", "resnet", "resnet-bn", "unet", "dlrm", "convnext", "segformer", "dinov2",
    "patchtst",
)  # fmt: skip
NORMALISED_BY_BATCH = ("resnet-bn",)
USED_UNEVENLY = ("switch",)  # an expert without rows gets no gradient

ANIMALS: dict[str, Animal] = {
    "gpt2": Animal(
        hugging_face(
            "GPT2LMHeadModel", "GPT2Config", n_positions=TIME, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, intermediate_size=None, num_key_value_heads=None, max_position_embeddings=None,
        ),
        text, token_loss,
    ),
    "llama": causal("Llama"),
    "llama-tied": causal("Llama", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=8),
    "qwen2-moe": causal("Qwen2Moe", shared_expert_intermediate_size=16, **EXPERTS),
    "qwen3-moe": causal("Qwen3Moe", head_dim=8, **EXPERTS),
    "gemma": causal("Gemma", head_dim=8, num_key_value_heads=1),
    "gemma3": causal("Gemma3", "Gemma3Text", head_dim=8),
    "phi3": causal("Phi3", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    "mistral": causal("Mistral"),
    "mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3": causal(
        "DeepseekV3", num_key_value_heads=HEADS, moe_intermediate_size=16, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    ),
    "neox": causal("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
    "opt": causal("OPT", ffn_dim=48, dropout=0.0, word_embed_proj_dim=WIDTH),
    "bloom": causal("Bloom", n_layer=2, n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0),
    "falcon": causal("Falcon", hidden_dropout=0.0, attention_dropout=0.0, multi_query=True, alibi=False),
    "olmo2": causal("Olmo2"),
    "starcoder2": causal("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
    "mamba": causal(
        "Mamba", state_size=4, num_attention_heads=None, num_key_value_heads=None, use_mambapy=False,
    ),
    "bert": Animal(
        hugging_face("BertForMaskedLM", "BertConfig", num_key_value_heads=None, **STILL), masked, token_loss,
    ),
    "albert": Animal(
        hugging_face(
            "AlbertForMaskedLM", "AlbertConfig", embedding_size=16, num_key_value_heads=None, **STILL,
        ),
        masked, token_loss,
    ),
    "t5": Animal(
        hugging_face(
            "T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2,
            num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0, hidden_size=None,
            num_key_value_heads=None, num_hidden_layers=None, num_attention_heads=None,
        ),
        seq2seq, token_loss,
    ),
    "bart": Animal(
        hugging_face(
            "BartForConditionalGeneration", "BartConfig", d_model=WIDTH, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=48,
            decoder_ffn_dim=48, dropout=0.0, decoder_start_token_id=0, hidden_size=None,
            num_key_value_heads=None, num_attention_heads=None,
        ),
        seq2seq, token_loss,
    ),
    "whisper": Animal(
        hugging_face(
            "WhisperForConditionalGeneration", "WhisperConfig", d_model=WIDTH, encoder_layers=1,
            decoder_layers=1, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
            encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=8,
            max_target_positions=16, decoder_start_token_id=0, hidden_size=None, num_key_value_heads=None,
            num_attention_heads=None,
        ),
        lambda g: (
            {"input_features": torch.randn(ROWS, 8, 16, generator=g), "decoder_input_ids": ids(g)}, ids(g),
        ),
        token_loss,
    ),
    "vit": Animal(
        hugging_face(
            "ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, num_labels=4,
            num_key_value_heads=None, vocab_size=None, max_position_embeddings=None, **STILL,
        ),
        image, class_loss,
    ),
    "swin": Animal(
        hugging_face(
            "SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2, embed_dim=16,
            depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=4, drop_path_rate=0.0,
            hidden_size=None, vocab_size=None, intermediate_size=None, num_hidden_layers=None,
            num_attention_heads=None, num_key_value_heads=None, max_position_embeddings=None, **STILL,
        ),
        lambda g: image(g, 16), class_loss,
    ),
    "clip": Animal(
        lambda: _clip(), lambda g: ((ids(g), image(g)[0]), torch.arange(ROWS)),
        lambda similarity, targets: functional.cross_entropy(similarity, targets % similarity.shape[1]),
    ),
    "wav2vec2": Animal(
        hugging_face(
            "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", conv_dim=[8, 8], conv_stride=[2, 2],
            conv_kernel=[3, 3], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=4,
            mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, num_key_value_heads=None,
            max_position_embeddings=None,
        ),
        lambda g: (torch.randn(ROWS, 64, generator=g), torch.randint(4, (ROWS,), generator=g)), class_loss,
    ),
    "nano": Animal(own.Nano, text, token_loss),
    "multi-query": Animal(own.MultiQuery, text, token_loss),
    "encoder": Animal(own.Encoder, text, token_loss),
    "transformer": Animal(own.Seq2Seq, pair, token_loss),
    "mixer": Animal(own.Mixer, text, token_loss),
    "soft-experts": Animal(own.Soft, text, token_loss),
    "resnet": Animal(own.ResNet, image, class_loss),
    "resnet-bn": Animal(own.BatchNormResNet, image, class_loss),
    "unet": Animal(own.UNet, image, class_loss),
    "scan": Animal(own.Scan, text, token_loss),
    "lstm": Animal(own.Lstm, text, token_loss),
    "translator": Animal(own.Translator, pair, token_loss),
    "dlrm": Animal(
        own.Dlrm,
        lambda g: (
            (torch.randn(ROWS, 8, generator=g), torch.randint(own.CATEGORIES, (ROWS, 4), generator=g)),
            torch.randint(2, (ROWS,), generator=g),
        ),
        class_loss,
    ),
    "two-losses": Animal(own.TwoLosses, text, two_losses),
    "between": Animal(own.Between, text, token_loss),
    "sliced": Animal(own.Sliced, text, token_loss),
    "hooked": Animal(own.Hooked, text, token_loss),
    **FAMILIES,
}  # fmt: skip


class _Clip(nn.Module):
    """Both towers of CLIP; row i of the similarity belongs to text i. Rows see each other."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        heads = {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
        }
        config = transformers.CLIPConfig(
            text_config={**heads, "vocab_size": WORDS, "max_position_embeddings": TIME, "eos_token_id": 1},
            vision_config={**heads, "image_size": 8, "patch_size": 4},
            projection_dim=16,
        )
        self.inner = transformers.CLIPModel(config)

    def forward(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        towers = self.inner(input_ids=tokens, pixel_values=pixels)
        return (towers.text_embeds * towers.image_embeds).sum(-1, keepdim=True) * torch.arange(
            1.0, 5.0, device=pixels.device
        )


def _clip() -> nn.Module:
    return _Clip()
