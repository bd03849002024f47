"""Communicators: the processes that share batch statistics.

Every communicator accepts the arrays of every library. A group of ranks is a communicator, too;
`SingleProcess` is the group of one.

Communicators are handles: a deep copy is the same handle. A pickle records how to find the
processes again, and the first use finds them. Importing this package imports no framework.
"""

from multibn.communicators.communicator import Communicator as Communicator
from multibn.communicators.communicator import SingleProcess as SingleProcess
from multibn.communicators.resolve import CommunicatorLike as CommunicatorLike
from multibn.communicators.resolve import DefaultCommunicator as DefaultCommunicator
from multibn.communicators.resolve import Group as Group
from multibn.communicators.resolve import as_communicator as as_communicator
