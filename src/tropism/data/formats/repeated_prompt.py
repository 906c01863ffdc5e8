"""Completions that repeat the prompt: public data sets have whole conversations beside a column `prompt`."""

from dataclasses import replace

from tropism.data.formats import fields
from tropism.data.formats.context import leading_system
from tropism.data.formats.fields import Content
from tropism.data.formats.format import Draft
from tropism.data.formats.plain_records import draft_of_conversation, draft_of_conversations
from tropism.data.rows import Dropped, Message, Reason

Messages = tuple[Message, ...]

_ASKING = ("user", "system", "developer")


def without_repeated_prompt(draft: Draft, place: str) -> Draft | Dropped:
    """A draft whose completions are what follows the prompt.

    A conversation may repeat the prompt or its last turns, or contain it after turns that the prompt lacks: a system
    message, or earlier turns where `prompt` is the last user turn. Then the prompt gets these turns. Plain text is
    unchanged.
    """
    conversations = {name: side for name, side in draft.completions.items() if isinstance(side, tuple) and side}
    if not conversations:
        return draft
    prompt = fields.as_messages(draft.prompt, "user")
    if not prompt:
        return _own_prompt(draft, conversations, place)
    if all(side[0].get("role") not in (*_ASKING, prompt[0].get("role")) for side in conversations.values()):
        return draft  # the usual case
    completions: dict[str, Content] = dict(draft.completions)
    prompts: list[Messages] = []
    for name, side in conversations.items():
        found, completions[name] = _parted(prompt, side)
        if found is None and _is_other_conversation(prompt, side):
            return Dropped(place, Reason.NO_COMPLETION,
                           f"'{name}' begins with role {fields.short_repr(side[0]['role'])} but does not contain the "
                           "prompt. If it is a complete conversation, ignore the column 'prompt' with "
                           "--columns unused=prompt.")
        if found is None:
            continue
        own, all_of_them = leading_system(prompt), leading_system(found)
        if own and len(all_of_them) > len(own):
            return Dropped(place, Reason.NO_COMPLETION, "the prompt has the system message "
                           f"{fields.short_repr(own[0].get('content'))}, but '{name}' has "
                           f"{fields.short_repr(all_of_them[-1].get('content'))}")
        prompts.append(found)
    body = prompt[len(leading_system(prompt)):]
    continued = len(prompts) < len(draft.completions)  # a side that follows the prompt without repeating it
    if any(_differ(prompts[0], other) for other in prompts[1:]) or (
            prompts and continued and _differ(prompts[0][len(prompts[0]) - len(body):], body)):
        return Dropped(place, Reason.NO_COMPLETION,
                       "the two sides have different messages before the completion, so they do not share a prompt")
    longer = prompts and len(prompts[0]) > len(prompt)
    return replace(draft, prompt=prompts[0] if longer else draft.prompt, completions=completions)


def _own_prompt(draft: Draft, conversations: dict[str, Messages], place: str) -> Draft | Dropped:
    """A draft with an empty prompt, whose conversations begin with their own."""
    if len(conversations) < len(draft.completions) or any(
            side[0].get("role") == "assistant" or side[-1].get("role") != "assistant"
            for side in conversations.values()):
        return draft
    if len(conversations) == 2:
        found = draft_of_conversations(conversations, place)
    else:
        ((name, messages),) = conversations.items()
        found = draft_of_conversation(messages, name, draft.desirable, place)
    return replace(found, tools=draft.tools) if isinstance(found, Draft) else found


def _parted(prompt: Messages, side: Messages) -> tuple[Messages | None, Messages]:
    """The prompt with the messages that a conversation has around it, and the rest; (None, all) without the prompt."""
    found = None
    while (cut := _cut(prompt, side)) is not None:
        before, side = cut
        system = leading_system(prompt)
        new = tuple(message for message in leading_system(before) if all(_differ((message,), (own,)) for own in system))
        prompt = (*system, *new, *before[len(leading_system(before)):], *prompt[len(system):])
        if prompt[-1].get("role") == "user":  # further messages of the user
            more = next((number for number, message in enumerate(side) if message.get("role") not in _ASKING), 0)
            prompt, side = (*prompt, *side[:more]), side[more:]
        found = prompt
    return found, side


def _cut(prompt: Messages, side: Messages) -> tuple[Messages, Messages] | None:
    """The messages of a conversation before the prompt, and those after it."""
    asked, said = _keys(prompt), _keys(side)
    for count in range(min(len(asked), len(said) - 1), 0, -1):
        if asked[-count] == said[0] and asked[-count:] == said[:count] and (
                count == len(asked) or side[0].get("role") != "assistant"):
            return (), side[count:]
    if side[0].get("role") not in _ASKING:
        return None
    lead, body = leading_system(side), asked[len(leading_system(prompt)):]
    if lead and len(lead) < len(side) and all(message.get("role") != "user" for message in side):
        return lead, side[len(lead):]  # a conversation without its user turn
    for start in range(1, len(said) - len(body)) if body else ():
        if said[start] == body[0] and said[start : start + len(body)] == body:
            return side[:start], side[start + len(body):]
    return None


def _keys(messages: Messages) -> list[tuple[object, str]]:
    """What makes two messages equal here: role and content."""
    return [(message.get("role"), (message.get("content") or "").strip()) for message in messages]


def _differ(one: Messages, other: Messages) -> bool:
    return _keys(one) != _keys(other)


def _is_other_conversation(prompt: Messages, side: Messages) -> bool:
    """True for a complete conversation where a completion of a user's turn should be."""
    return (prompt[-1].get("role") == "user" and side[0].get("role") in _ASKING
            and side[-1].get("role") == "assistant")
