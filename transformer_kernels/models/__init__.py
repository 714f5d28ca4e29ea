"""Reference models, one per file: the config, its named sizes, the model, and its published files.

Every model takes `attn_implementation` ("eager", "fused" or "sdpa"), which does not affect the
result beyond rounding: weights trained with one implementation work with the others.
"""

from .bert import SIZES as BERT_SIZES
from .bert import Bert, BertConfig, BertForClassification, BertForPreTraining, PreTrainingLogits
from .classifier import SIZES as CLASSIFIER_SIZES
from .classifier import Classifier, ClassifierConfig
from .gated_deltanet import SIZES as GATED_DELTANET_SIZES
from .gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig, HybridState
from .generation import Memory
from .generator import SIZES, GeneratorConfig, TextGenerator
from .gpt2 import GPT2, GPT2Config
from .gpt2 import SIZES as GPT2_SIZES
from .linear_transformer import SIZES as LINEAR_TRANSFORMER_SIZES
from .linear_transformer import LinearTransformer, LinearTransformerConfig
from .lookup import FactTable, FactTableConfig, Lookup, LookupConfig
from .reformer import SIZES as REFORMER_SIZES
from .reformer import Reformer, ReformerConfig
from .sparse_transformer import SIZES as SPARSE_TRANSFORMER_SIZES
from .sparse_transformer import SparseTransformer, SparseTransformerConfig
from .t5 import SIZES as T5_SIZES
from .t5 import T5, T5Config
from .transformer_xl import SIZES as TRANSFORMER_XL_SIZES
from .transformer_xl import Memories, TransformerXL, TransformerXLConfig
from .translator import SIZES as TRANSLATOR_SIZES
from .translator import Translator, TranslatorConfig

__all__ = [
    "BERT_SIZES",
    "CLASSIFIER_SIZES",
    "GATED_DELTANET_SIZES",
    "GPT2",
    "GPT2_SIZES",
    "LINEAR_TRANSFORMER_SIZES",
    "REFORMER_SIZES",
    "SIZES",
    "SPARSE_TRANSFORMER_SIZES",
    "T5",
    "T5_SIZES",
    "TRANSFORMER_XL_SIZES",
    "TRANSLATOR_SIZES",
    "Bert",
    "BertConfig",
    "BertForClassification",
    "BertForPreTraining",
    "Classifier",
    "ClassifierConfig",
    "FactTable",
    "FactTableConfig",
    "GPT2Config",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GeneratorConfig",
    "HybridState",
    "LinearTransformer",
    "LinearTransformerConfig",
    "Lookup",
    "LookupConfig",
    "Memories",
    "Memory",
    "PreTrainingLogits",
    "Reformer",
    "ReformerConfig",
    "SparseTransformer",
    "SparseTransformerConfig",
    "T5Config",
    "TextGenerator",
    "TransformerXL",
    "TransformerXLConfig",
    "Translator",
    "TranslatorConfig",
]
