"""Every way into the stack: functions of the gateway's address and a `Request`, which return its `Outcome`.

Text goes to the model that a Request names; ways without text send its ids to the predictor, or its
bytes to the Python model `tensors`.
"""

from tests.system.grpc_ways_in import (
    generate,
    grpc_web,
    ids_request,
    model_infer,
    model_stream_infer,
    tensor_request,
    text_request,
)
from tests.system.request_outcome import WayIn
from tests.system.rest_ways_in import (
    anthropic_shape,
    binary_tensors_body,
    chat_body,
    completion_body,
    fields_body,
    generate_body,
    messages_body,
    openai_shape,
    responses_body,
    responses_shape,
    rest,
    tensors_body,
    v2_shape,
)

TEXT: dict[str, WayIn] = {
    "Generate": generate,
    "Generate by gRPC-Web": grpc_web,
    "Generate by REST": rest("/headrace/v1/generate", generate_body, v2_shape),
    "ModelInfer": model_infer(text_request),
    "ModelStreamInfer": model_stream_infer(text_request),
    "ModelStreamInfer with statuses": model_stream_infer(text_request, as_status=True),
    "completions": rest("/v1/completions", completion_body(False), openai_shape),
    "completions, events": rest("/openai/v1/completions", completion_body(True), openai_shape),
    "chat": rest("/v1/chat/completions", chat_body(False), openai_shape),
    "chat, events": rest("/v1/chat/completions", chat_body(True), openai_shape),
    "messages": rest("/v1/messages", messages_body(False), anthropic_shape),
    "messages, events": rest("/v1/messages", messages_body(True), anthropic_shape),
    "responses": rest("/v1/responses", responses_body(False), responses_shape),
    "responses, events": rest("/openai/v1/responses", responses_body(True), responses_shape),
    "infer": rest("/v2/models/{model}/infer", tensors_body("text_input"), v2_shape),
    "infer, binary": rest("/v2/models/{model}/infer", binary_tensors_body("text_input"), v2_shape),
    "generate": rest("/v2/models/{model}/generate", fields_body("text_input"), v2_shape),
    "generate_stream": rest("/v2/models/{model}/generate_stream", fields_body("text_input"), v2_shape),
}
# Ways to a model that the transformer relays.
RELAYED: dict[str, WayIn] = {
    "ModelInfer, relayed": model_infer(tensor_request),
    "ModelStreamInfer, relayed": model_stream_infer(tensor_request),
    "ModelStreamInfer with statuses, relayed": model_stream_infer(tensor_request, as_status=True),
    "infer, relayed": rest("/v2/models/{model}/infer", tensors_body("x"), v2_shape, True),
    "infer, binary, relayed": rest("/v2/models/{model}/infer", binary_tensors_body("x"), v2_shape, True),
    "generate_stream, relayed": rest(
        "/v2/models/{model}/generate_stream", fields_body("x"), v2_shape, takes_tensors=True
    ),
}
DIRECT = ("ModelInfer, relayed",)  # Directly to the predictor, once the transformer has listed the model.
# Directly to the predictor.
PREDICTOR: dict[str, WayIn] = {
    "ModelInfer, predictor": model_infer(ids_request, "predictor"),
    "ModelStreamInfer, predictor": model_stream_infer(ids_request, "predictor:8080"),
    "ModelStreamInfer with statuses, predictor": model_stream_infer(ids_request, "predictor", as_status=True),
}
WAYS_IN = TEXT | RELAYED | PREDICTOR
# Ways on which an error can come after a part of the answer.
REST_STREAMS = (
    "Generate by REST",
    "completions, events",
    "chat, events",
    "messages, events",
    "responses, events",
    "generate_stream",
)
STREAMS = (
    *REST_STREAMS,
    "Generate",
    "Generate by gRPC-Web",
    "ModelStreamInfer",
    "ModelStreamInfer with statuses",
    "ModelStreamInfer, predictor",
    "ModelStreamInfer with statuses, predictor",
)
