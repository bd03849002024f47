"""Processes that share batch statistics, one file per library that moves their bytes.

Every communicator works with the arrays of every library. A group of ranks is just another
communicator; `SingleProcess` is the group of one.

Communicators are handles: a deep copy is the same handle, and a pickle records how to find the
processes again, which happens at the first use. Importing this package imports no framework.
"""

from multibn.communicators.communicator import Communicator as Communicator
from multibn.communicators.communicator import SingleProcess as SingleProcess
from multibn.communicators.resolve import CommunicatorLike as CommunicatorLike
from multibn.communicators.resolve import DefaultCommunicator as DefaultCommunicator
from multibn.communicators.resolve import Group as Group
from multibn.communicators.resolve import as_communicator as as_communicator
