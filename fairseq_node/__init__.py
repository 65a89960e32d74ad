"""fairseq_node: Transformers with continuous depth for fairseq (``--user-dir fairseq_node``)."""

from fairseq_node.criterions import with_path  # noqa: F401
from fairseq_node.models import node_transformer  # noqa: F401
