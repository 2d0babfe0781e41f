"""What can go wrong with a bucket, said in one line with what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.store.base import StoreError, StoreFull

CREDENTIALS = {
    "AccessDenied": "these credentials may not do that",
    "ExpiredToken": "the credentials have expired",
    "ExpiredTokenException": "the credentials have expired",
    "InvalidAccessKeyId": "the access key is not known there",
    "InvalidToken": "the session token is not valid",
    "SignatureDoesNotMatch": "the secret key is not right",
}
FULL = ("QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage")
INSUFFICIENT_STORAGE = 507


@contextmanager
def named(url: str, what: str, takes: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Raise boto3's errors as StoreError, and StoreFull where the bucket has no room. Credentials never appear.

    takes: whether the bucket takes an object of one byte. It is asked after an error that says nothing, as SeaweedFS
    gives when its volumes are full.
    """
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except ClientError as error:
        raise _client_error(url, what, error, takes) from error
    except NoCredentialsError as error:
        raise StoreError(f"{what} in {url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
    except (BotoCoreError, S3UploadFailedError) as error:
        raise StoreError(f"{what} in {url}: {error}; is the object storage up, and AWS_ENDPOINT_URL right?") from error


def _client_error(url: str, what: str, error, takes: Callable[[], bool]) -> StoreError:
    detail = error.response["Error"]
    code, status = detail.get("Code", ""), error.response["ResponseMetadata"]["HTTPStatusCode"]
    if code in CREDENTIALS:
        return StoreError(f"{what} in {url}: {CREDENTIALS[code]} ({code}); renew them or ask whoever owns the bucket")
    if code in FULL or status == INSUFFICIENT_STORAGE or (code == "InternalError" and not takes()):
        return StoreFull(
            f"{what} in {url}: the bucket is full ({code}); delete artifacts (`lockstep gc`) or give it more room"
        )
    if code == "NoSuchBucket":
        return StoreError(f"{what} in {url}: there is no such bucket; create it or correct the URL")
    return StoreError(f"{what} in {url}: {code} {detail.get('Message', '')} (status {status})")
