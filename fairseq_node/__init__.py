"""fairseq_node: Transformers with continuous depth for fairseq (``--user-dir fairseq_node``)."""

import os

from fairseq_node import compat

compat.install()

from fairseq_node.criterions import with_path  # noqa: E402, F401
from fairseq_node.models import node_encoder, node_transformer  # noqa: E402, F401
from fairseq_node.tasks import node_translation, parity  # noqa: E402, F401

__version__ = "0.1.0"


class _Paths(list):
    """fairseq looks for ``--user-dir`` in the path of the module that has been imported, letter by
    letter; the same directory under another name (a link, ``fairseq/../fairseq_node``) is the same."""

    def __contains__(self, directory):
        return any(os.path.realpath(directory) == os.path.realpath(entry) for entry in self)


__path__ = _Paths(__path__)
