"""Answers with what it is asked: every input under its own name, for measuring the way there and back."""


async def execute(request):
    return request.raw
