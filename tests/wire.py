"""Flower's transport: what a message is after it."""

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage


def travel(message: Message) -> Message:
    """What arrives of a message, through Flower's own serialization: dtypes and integers are the wire's."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))
