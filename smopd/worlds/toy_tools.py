"""The toy world's tools: parameters with the pools of their values, and the ways to ask for each tool."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_POOL_TABLE = {
    "city": "paris rome oslo tokyo lima cairo delhi berlin madrid dublin seoul quito",
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "person": "anna bruno clara david emma felix greta hugo iris jonas",
    "occasion": "work school gym lunch pills laundry meeting homework",
    "food": "pizza sushi pasta curry salad soup tacos noodles",
    "place": "kitchen bedroom bathroom hallway office garage",
    "music": "yesterday imagine thriller hello halo roxanne creep",
    "int": " ".join(map(str, range(1, 41))),
}
POOLS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {pool: tuple(values.split()) for pool, values in _POOL_TABLE.items()}
)


@dataclass(frozen=True)
class Parameter:
    """A parameter: the pool of its values, and how often demonstrations misname it or quote its integer."""

    pool: str
    alias: str
    alias_rate: float = 0.1
    quoted_rate: float = 0.0


# The systematic errors: a share this high of the demonstrations makes the wrong form the greedy one.
_USUAL = 0.88

PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {
        "city": Parameter("city", "location", _USUAL),
        "day": Parameter("day", "date", 0.15),
        "hour": Parameter("int", "time", 0.10, _USUAL),
        "label": Parameter("occasion", "title", _USUAL),
        "guests": Parameter("int", "party", 0.15, _USUAL),
        "volume": Parameter("int", "loudness", 0.05, _USUAL),
        "song": Parameter("music", "track", 0.20),
        "name": Parameter("person", "contact", 0.10),
        "amount": Parameter("int", "money", _USUAL, 0.10),
        "nights": Parameter("int", "stay", 0.15, 0.15),
        "minutes": Parameter("int", "duration", _USUAL, 0.10),
        "dish": Parameter("food", "meal", 0.10),
        "count": Parameter("int", "quantity", 0.15, _USUAL),
        "room": Parameter("place", "area", 0.15),
        "level": Parameter("int", "brightness", 0.20, 0.10),
        "seats": Parameter("int", "passengers", 0.10, _USUAL),
        "degrees": Parameter("int", "temperature", 0.15, _USUAL),
        "number": Parameter("int", "id", 0.15, _USUAL),
    }
)


@dataclass(frozen=True)
class Tool:
    """A tool's parameters in order, and the phrasings in which a user asks for it."""

    parameters: tuple[str, ...]
    requests: tuple[str, ...]


# A tool with its parameters, and below it the ways to ask for it.
_TOOL_TABLE = """
get_weather(city, day)
    what will the weather be in {city} on {day}?
    will it rain in {city} on {day}?
    tell me the forecast for {city} on {day}

set_alarm(hour, label)
    wake me at {hour} for {label}
    set an alarm at {hour} for {label}
    i must be up at {hour} for {label}

book_table(city, guests)
    book a table in {city} for {guests}
    we are {guests} and want dinner in {city}
    reserve a restaurant in {city} for {guests}

play_song(song, volume)
    play {song} at volume {volume}
    i want to hear {song} at {volume}
    put on {song} and set the volume to {volume}

send_money(name, amount)
    send {name} {amount} dollars
    pay {amount} dollars to {name}
    i owe {name} {amount} dollars

find_hotel(city, nights)
    find a hotel in {city} for {nights} nights
    where can we sleep in {city} for {nights} nights?
    i need a bed in {city} for {nights} nights

start_timer(minutes)
    start a timer for {minutes} minutes
    count down {minutes} minutes
    tell me in {minutes} minutes

order_food(dish, count)
    order {count} {dish}
    bring us {count} portions of {dish}
    we want {count} {dish} for dinner

add_event(label, day)
    put {label} on {day} in my calendar
    remind me of {label} on {day}
    add {label} to my calendar for {day}

call_contact(name)
    call {name} please
    i want to talk to {name}
    give {name} a ring

set_light(room, level)
    turn the light in the {room} to {level}
    dim the {room} to {level}
    make the {room} {level} percent bright

buy_ticket(city, seats)
    buy {seats} tickets to {city}
    get me {seats} seats on the train to {city}
    we need the train to {city} for {seats}

set_heating(room, degrees)
    heat the {room} to {degrees} degrees
    make it {degrees} degrees in the {room}
    the {room} is cold so go to {degrees}

track_parcel(number)
    where is parcel {number}?
    track my parcel {number}
    has parcel {number} left?
"""


def _read_tools(table: str) -> dict[str, Tool]:
    tools = {}
    for entry in table.strip().split("\n\n"):
        signature, *requests = (line.strip() for line in entry.split("\n"))
        name, parameters = signature.rstrip(")").split("(")
        tools[name] = Tool(tuple(parameters.split(", ")), tuple(requests))
    return tools


TOOLS: Mapping[str, Tool] = MappingProxyType(_read_tools(_TOOL_TABLE))
