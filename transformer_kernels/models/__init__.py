"""Reference models, one per file; each file begins with the config and its named sizes."""

from transformer_kernels.models.bert import SIZES as BERT_SIZES
from transformer_kernels.models.bert import (
    Bert,
    BertConfig,
    BertForClassification,
    BertForPreTraining,
    PreTrainingLogits,
)
from transformer_kernels.models.classifier import SIZES as CLASSIFIER_SIZES
from transformer_kernels.models.classifier import Classifier, ClassifierConfig
from transformer_kernels.models.encoder_decoder import Memory
from transformer_kernels.models.fact_table import FactTable, FactTableConfig
from transformer_kernels.models.generator import SIZES, GeneratorConfig, TextGenerator
from transformer_kernels.models.gpt2 import GPT2, GPT2Config
from transformer_kernels.models.gpt2 import SIZES as GPT2_SIZES
from transformer_kernels.models.linear_transformer import SIZES as LINEAR_TRANSFORMER_SIZES
from transformer_kernels.models.linear_transformer import LinearTransformer, LinearTransformerConfig
from transformer_kernels.models.lookup import Lookup, LookupConfig
from transformer_kernels.models.reformer import SIZES as REFORMER_SIZES
from transformer_kernels.models.reformer import Reformer, ReformerConfig
from transformer_kernels.models.sparse_transformer import SIZES as SPARSE_TRANSFORMER_SIZES
from transformer_kernels.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from transformer_kernels.models.t5 import SIZES as T5_SIZES
from transformer_kernels.models.t5 import T5, T5Config
from transformer_kernels.models.transformer_xl import SIZES as TRANSFORMER_XL_SIZES
from transformer_kernels.models.transformer_xl import Memories, TransformerXL, TransformerXLConfig
from transformer_kernels.models.translator import SIZES as TRANSLATOR_SIZES
from transformer_kernels.models.translator import Translator, TranslatorConfig

__all__ = [
    "BERT_SIZES",
    "CLASSIFIER_SIZES",
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
    "GeneratorConfig",
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
