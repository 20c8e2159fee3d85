"""An eviction plugin of another user: `python -m tests.builders.foreign_plugin SOCKET UID` serves until it is killed.

It imports as the user that starts it, then gives up its privileges for good, as a process of that user would be.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from api.proto import eviction_plugin_pb2 as wire
from api.proto import plugin_registration_pb2 as registration


def handlers(descriptor: Any, answers: dict[str, Any]) -> Any:
    """Return handlers that give these answers, one for each method."""

    def answering(answer: Any) -> Any:
        async def reply(_request: Any, _context: Any) -> Any:
            return answer

        return reply

    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            answering(answer),
            GetMessageClass(descriptor.methods_by_name[name].input_type).FromString,
            GetMessageClass(descriptor.methods_by_name[name].output_type).SerializeToString,
        )
        for name, answer in answers.items()
    }
    return grpc.method_handlers_generic_handler(descriptor.full_name, methods)


async def serve(path: str) -> None:
    """Serve a plugin that evicts the pod with the uid `uid-batch` without grace, and print `ready`."""
    evict = wire.GetEvictPodsResponse()
    named = evict.evict_pods.add(reason="because I can", force_evict=True)
    named.pod.metadata.uid = "uid-batch"
    named.deletion_options.grace_period_seconds = 0
    server = grpc.aio.server()
    info = registration.PluginInfo(type="EvictionPlugin", name="foreign", supported_versions=["v1alpha1"])
    server.add_generic_rpc_handlers(
        (
            handlers(
                registration.DESCRIPTOR.services_by_name["Registration"],
                {"GetInfo": info, "NotifyRegistrationStatus": registration.RegistrationStatusResponse()},
            ),
            handlers(
                wire.DESCRIPTOR.services_by_name["EvictionPlugin"],
                {
                    "GetToken": wire.GetTokenResponse(),
                    "GetEvictPods": evict,
                    "ThresholdMet": wire.ThresholdMetResponse(),
                    "GetTopEvictionPods": wire.GetTopEvictionPodsResponse(),
                },
            ),
        )
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    os.setgroups([])
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
    asyncio.run(serve(sys.argv[1]))
