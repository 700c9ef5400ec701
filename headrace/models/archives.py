"""Takes a model out of a layer of an image: an archive that anybody may have made.

Only plain files below one folder are written, and only those that services read. A link is written as a second name of
its target, so nothing on the disk leads out of the folder. Raises StartupError in one line.
"""

import lzma
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from headrace.errors import StartupError
from headrace.models.downloads import is_plain

_REMOVED = ".wh."  # How a layer removes a file of an earlier one.


def unpack(location: str, root: str, archive: Path, folder: Path) -> None:
    """Writes what the archive has below `root`, which "" says is all of it, into the folder."""
    links: list[tuple[str, str]] = []
    try:
        with tarfile.open(archive) as members:
            for member in members:
                if member.size > shutil.disk_usage(folder).free:
                    raise ValueError(f"{member.name} has {member.size / 1e6:.1f} MB, more than the disk")
                name = _name(member.name, root)
                if PurePosixPath(name).name.startswith(_REMOVED):
                    raise ValueError(f"{member.name} removes a file of an earlier layer; build the image without that")
                if not is_plain(name) or member.isdir():
                    continue
                if member.issym():
                    links.append(
                        (name, _name(os.path.normpath(f"{PurePosixPath(member.name).parent}/{member.linkname}"), root))
                    )
                elif member.islnk():
                    links.append((name, _name(member.linkname, root)))
                elif member.isfile() and not member.issparse():
                    _write(members, member, folder / name)
                else:
                    raise ValueError(f"{member.name} is not a file")
        for name, target in links:
            if not is_plain(target) or not (folder / target).is_file():
                raise ValueError(f"{name} is a link that leads out of the model")
            (folder / name).unlink(missing_ok=True)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / target, folder / name)
    except (ValueError, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise StartupError(f"{location}: a layer cannot be unpacked: {str(error).splitlines()[0]}") from None


def _name(path: str, root: str) -> str:
    """A member's path relative to `root`; "" for one that is not below it. Raises ValueError for one that climbs."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path} leads out of the archive")
    if root and parts[:1] != [root]:
        return ""
    return "/".join(parts[1:] if root else parts)


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unpacking")
    source = members.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name} is not a file")
    try:
        with source, unfinished.open("wb") as output:
            shutil.copyfileobj(source, output, 1 << 20)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
