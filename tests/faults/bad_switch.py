"""A switch with two ports that damages what passes: `bad_switch.py PORT PORT`, with a rule per line of its input.

    delay 0.05     every frame waits so many seconds
    lose 0.05      this share of the frames is dropped, by a seeded generator
    shuffle 0.25   this share of the frames comes 20 ms later, behind others, and once more
    cut            nothing passes
    reset          every TCP packet with data is answered by a reset to both ends, but those of port 29500
    heal           everything passes

It needs no more of the kernel than veth and packet sockets.
"""

import contextlib
import heapq
import itertools
import random
import selectors
import socket
import struct
import sys
import time

_ALL, _OUTGOING, _PACKET, _VNET_HDR, _HEADER = 0x0003, 4, 263, 15, 10
_KEPT_PORT = 29500  # of torchrun's store
_LATE_S = 0.02


def opened(port: str) -> socket.socket:
    """A packet socket on a port; frames come and go with their header of offloads, so that none must be split."""
    own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    own.setsockopt(_PACKET, _VNET_HDR, 1)
    own.bind((port, 0))
    own.setblocking(False)
    return own


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2])) + (data[-1] << 8) * (len(data) % 2)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def resets(frame: bytes) -> tuple[bytes, bytes] | None:
    """The resets for the sender and the receiver of a frame; None: it is no TCP packet with data, or of the store."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return None
    start = 14 + (frame[14] & 15) * 4
    ports, seq, ack = frame[start : start + 4], *struct.unpack("!II", frame[start + 4 : start + 12])
    size = struct.unpack("!H", frame[16:18])[0] - (start - 14) - (frame[start + 12] >> 4) * 4
    if size <= 0 or _KEPT_PORT in struct.unpack("!HH", ports):
        return None
    macs, source, target = (frame[6:12], frame[:6]), frame[26:30], frame[30:34]
    back = _reset(macs[1] + macs[0], target, source, ports[2:] + ports[:2], ack)
    on = _reset(macs[0] + macs[1], source, target, ports, seq)
    return back, on


def _reset(macs: bytes, source: bytes, target: bytes, ports: bytes, seq: int) -> bytes:
    tcp = ports + struct.pack("!IIBBHHH", seq, 0, 5 << 4, 0x04, 0, 0, 0)
    pseudo = source + target + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0) + source + target
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    return macs[6:] + macs[:6] + b"\x08\x00" + ip + tcp


def copies(rule: str, much: float, dice: random.Random) -> list[float]:
    """After how many seconds a frame passes, once for each copy."""
    if rule == "cut" or (rule == "lose" and dice.random() < much):
        return []
    if rule == "shuffle" and dice.random() < much:
        return [_LATE_S, _LATE_S]
    return [much if rule == "delay" else 0.0]


def main(names: list[str]) -> None:
    ports = [opened(name) for name in names]
    chooser = selectors.DefaultSelector()
    for readable in (*ports, sys.stdin):
        chooser.register(readable, selectors.EVENT_READ)
    rule, much, dice, order = "heal", 0.0, random.Random(0), itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []

    def put(port: socket.socket, data: bytes, delay_s: float) -> None:
        heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), port, data))

    print("ready", flush=True)
    while True:
        left = waiting[0][0] - time.monotonic() if waiting else None
        for key, _ in chooser.select(None if left is None else max(left, 0)):
            if key.fileobj is sys.stdin:
                if not (line := sys.stdin.readline()):
                    return
                rule, much = line.split()[0], float([*line.split(), "0"][1])
                print("done", flush=True)
                continue
            data, address = key.fileobj.recvfrom(1 << 17)
            if address[2] == _OUTGOING:
                continue
            own, other = (ports if key.fileobj is ports[0] else ports[::-1])[:2]
            if rule == "reset" and (both := resets(data[_HEADER:])):
                put(own, bytes(_HEADER) + both[0], 0.0)
                put(other, bytes(_HEADER) + both[1], 0.0)
                continue
            for delay_s in copies(rule, much, dice):
                put(other, data, delay_s)
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, port, data = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a full queue drops a frame, as a switch does
                port.send(data)


if __name__ == "__main__":
    main(sys.argv[1:])
