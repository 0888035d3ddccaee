"""How agents talk: messages, authenticated frames, connections, and the door through which strangers come."""

from hpctrain.monitor.wire.connection import Connection, connect
from hpctrain.monitor.wire.door import Door, DoorLimits, listen, raise_descriptors
from hpctrain.monitor.wire.message import Message, ProtocolError
from hpctrain.system.address import Interface, interfaces, meeting_address, routed_address

__all__ = [
    "Connection",
    "Door",
    "DoorLimits",
    "Interface",
    "Message",
    "ProtocolError",
    "connect",
    "interfaces",
    "listen",
    "meeting_address",
    "raise_descriptors",
    "routed_address",
]
